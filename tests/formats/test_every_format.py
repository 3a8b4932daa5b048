"""What holds for every document in every format: each key ends in one line of the report, and nothing but a
`ConfigError` is raised."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from accounting import FORMATS, WRITTEN, faults_of
from documents import SEEDS, documents, odd_values, reordered
from hypothesis import given, note, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from unishard.cli import app
from unishard.cli.text_report import write_text
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Outcome, catalog, translate
from unishard.formats.catalog import recognise
from unishard.formats.files.source import open_source

MOST_SECONDS = 2.0
INSTEAD = ("; ", "must be ", "is not in the config: ")
"""What stands before what to write instead."""
OVERRIDES = ((), ("backend=fsdp",), ("backend=deepspeed",), ("training.micro_batch_size=3",))


def outcome_of(data: Any, to: str, from_: str | None, overrides: tuple[str, ...] = ()) -> Outcome | ConfigError:
    start = time.process_time()
    outcome: Outcome | ConfigError
    try:
        outcome = translate(data, to, from_=from_, overrides=overrides)
    except ConfigError as error:
        outcome = error
    assert time.process_time() - start < MOST_SECONDS
    if isinstance(outcome, ConfigError):
        assert all(any(sign in problem.what for sign in INSTEAD) for problem in outcome.problems), outcome
    return outcome


def lines(outcome: Outcome) -> list[tuple[str, str, str]]:
    return sorted((item.key, str(item.fit), item.becomes) for item in outcome.items)


def check(name: str, data: dict[str, Any], to: str, overrides: tuple[str, ...]) -> None:
    note(f"{name} to {to} {overrides}: {data!r}")
    outcome = outcome_of(data, to, name, overrides)
    if isinstance(outcome, ConfigError):
        return
    assert faults_of(outcome) == []
    again = outcome_of(reordered(data), to, name, overrides)
    assert isinstance(again, Outcome)
    if not outcome.of(Fit.UNSUPPORTED) and not again.of(
        Fit.UNSUPPORTED
    ):  # of two that contradict each other, the first counts
        assert lines(again) == lines(outcome)
        assert again.document == outcome.document


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("to", WRITTEN)
def test_what_people_write_translates_without_a_fault(name: str, to: str) -> None:
    for data in SEEDS[name]:
        outcome = translate(data, to, from_=name)
        assert faults_of(outcome) == []
        again = translate(data, to, from_=name)
        assert (again.items, again.text) == (outcome.items, outcome.text)
        report = io.StringIO()
        write_text(outcome, report, full=True)
        said = report.getvalue().splitlines()
        assert [line for line in said if len(line) > 80 and " " in line.strip()] == []
        assert "unishard" in (name, to) or [line for line in said if "unishard" in line] == []


@pytest.mark.parametrize("name", FORMATS)
def test_what_people_write_is_recognised(name: str) -> None:
    for data in SEEDS[name]:
        assert recognise(open_source(data)).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_broken_documents(name: str, examples: int) -> None:
    @settings(max_examples=max(examples // len(FORMATS), 1), derandomize=examples < 1000)
    @given(documents(name), st.sampled_from(WRITTEN), st.sampled_from(OVERRIDES))
    def holds(data: dict[str, Any], to: str, overrides: tuple[str, ...]) -> None:
        check(name, data, to, overrides)

    holds()


def test_documents_of_chance_in_any_format(examples: int) -> None:
    @settings(max_examples=max(examples // 10, 1), derandomize=examples < 1000)
    @given(
        st.dictionaries(st.text(max_size=4), odd_values, max_size=4), st.sampled_from(FORMATS), st.sampled_from(WRITTEN)
    )
    def holds(data: dict[str, Any], name: str, to: str) -> None:
        check(name, data, to, ())

    holds()


TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b": ",
    b",",
    b'"',
    b"'",
    b"\n",
    b"\t",
    b"#",
    b"&a ",
    b"*a",
    b"<<: ",
    b"- ",
    b"---\n",
    b"%YAML 1.1\n",
    b"|",
)
TOKENS += (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xc3",
    b".nan",
    b"1e999",
    b"${x}",
    b"? ",
    b"//",
    b"/*",
    b"\r",
    b"=",
    b"[[a]]",
    b"9" * 5000,
)
TOKENS += (
    b"|",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 500,
    b"- " * 500,
    b"!!python/object:os.system ",
    b"2001-01-01",
    b"12:30:45",
    b"NaN",
)
COMMANDS = (
    "translate {0} --to deepspeed",
    "diff {0} {0}",
    "set {0} training.seed=7",
    "init --yes --from {0} -o {1}",
    "migrate {2}",
)


@st.composite
def broken_texts(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of any format, and its text with up to six things wrong."""
    name = draw(st.sampled_from(FORMATS))
    data = draw(st.sampled_from(SEEDS[name]))
    as_json = name not in WRITTEN
    text = (json.dumps(data, indent=1) if as_json else translate(data, name, from_=name).text).encode()
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(("flip", "cut", "begin", "remove", "repeat", "indent", "insert"))):
            case "flip" if at < len(text):
                text = text[:at] + bytes([text[at] ^ (1 << draw(st.integers(0, 7)))]) + text[at + 1 :]
            case "cut":
                text = text[:at]
            case "begin":
                text = text[at:]
            case "remove":
                text = text[:at] + text[at + draw(st.integers(1, 30)) :]
            case "repeat":
                lines = text.split(b"\n")
                text = b"\n".join([*lines, draw(st.sampled_from(lines))])
            case "indent":
                text = text[:at].rpartition(b"\n")[0] + b"\n  " + text[at:]
            case _:
                text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at:]
    return ".json" if as_json else catalog.get(name).suffix, text


def test_broken_texts(tmp_path: Path, examples: int) -> None:
    @settings(max_examples=max(examples // 4, 1), derandomize=examples < 1000)
    @given(broken_texts(), st.sampled_from(WRITTEN), st.sampled_from((None, *FORMATS)))
    def holds(file: tuple[str, bytes], to: str, name: str | None) -> None:
        path = tmp_path / f"config{file[0]}"
        path.write_bytes(file[1])
        outcome = outcome_of(path, to, name)
        if isinstance(outcome, Outcome):
            assert faults_of(outcome) == []

    holds()


def test_no_command_fails_on_a_broken_file(tmp_path: Path, examples: int) -> None:
    written = tmp_path / "written.yaml"

    @settings(max_examples=max(examples // 10, 1), derandomize=examples < 1000)
    @given(broken_texts(), st.sampled_from(COMMANDS))
    def holds(file: tuple[str, bytes], command: str) -> None:
        path = tmp_path / f"config{file[0]}"
        path.write_bytes(file[1])
        result = CliRunner().invoke(app, command.format(path, written, tmp_path).split())
        written.unlink(missing_ok=True)
        path.unlink()
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in (0, 1, 2)

    holds()
