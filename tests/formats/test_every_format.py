"""What holds for every document in every format: each key ends in one line of the report, and nothing but a `ConfigError` is raised."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from accounting import FORMATS, faults_of
from documents import SEEDS, documents, odd_values, reordered
from hypothesis import given, note, settings
from hypothesis import strategies as st

from unishard.errors import ConfigError
from unishard.formats import Outcome, translate
from unishard.formats.catalog import recognise
from unishard.formats.source import open_source
from unishard.meanings import Verdict

MOST_SECONDS = 2.0
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
        assert all(any(sign in problem.what for sign in ("; ", "must be ")) for problem in outcome.problems), outcome
    return outcome


def lines(outcome: Outcome) -> list[tuple[str, str, str]]:
    return sorted((item.key, str(item.verdict), item.becomes) for item in outcome.items)


def check(name: str, data: dict[str, Any], to: str, overrides: tuple[str, ...]) -> None:
    note(f"{name} to {to} {overrides}: {data!r}")
    outcome = outcome_of(data, to, name, overrides)
    if isinstance(outcome, ConfigError):
        return
    assert faults_of(outcome) == []
    again = outcome_of(reordered(data), to, name, overrides)
    assert isinstance(again, Outcome)
    if not outcome.of(Verdict.REFUSED) and not again.of(Verdict.REFUSED):  # of two that contradict each other, the first counts
        assert lines(again) == lines(outcome)
        assert again.document == outcome.document or repr(again.document) != repr(again.document)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_what_people_write_translates_without_a_fault(name: str, to: str) -> None:
    for data in SEEDS[name]:
        outcome = translate(data, to, from_=name)
        assert faults_of(outcome) == []
        again = translate(data, to, from_=name)
        assert (again.items, again.text) == (outcome.items, outcome.text)


@pytest.mark.parametrize("name", FORMATS)
def test_what_people_write_is_recognised(name: str) -> None:
    for data in SEEDS[name]:
        assert recognise(open_source(data)).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_broken_documents(name: str, examples: int) -> None:
    @settings(max_examples=max(examples // len(FORMATS), 1), derandomize=examples < 1000)
    @given(documents(name), st.sampled_from(FORMATS), st.sampled_from(OVERRIDES))
    def holds(data: dict[str, Any], to: str, overrides: tuple[str, ...]) -> None:
        check(name, data, to, overrides)

    holds()


def test_documents_of_chance_in_any_format(examples: int) -> None:
    @settings(max_examples=max(examples // 10, 1), derandomize=examples < 1000)
    @given(st.dictionaries(st.text(max_size=4), odd_values, max_size=4), st.sampled_from(FORMATS), st.sampled_from(FORMATS))
    def holds(data: dict[str, Any], name: str, to: str) -> None:
        check(name, data, to, ())

    holds()


def test_broken_files(tmp_path: Path, examples: int) -> None:
    texts = [json.dumps(data, indent=1) for name in FORMATS for data in SEEDS[name]]
    texts += [translate(data, "unishard", from_=name).text for name in FORMATS for data in SEEDS[name]]
    path = tmp_path / "config.json"

    @settings(max_examples=max(examples // 4, 1), derandomize=examples < 1000)
    @given(st.sampled_from(texts), st.lists(st.tuples(st.integers(0, 2000), st.text(max_size=3), st.integers(0, 3)), max_size=4))
    def holds(text: str, edits: list[tuple[int, str, int]]) -> None:
        for at, inserted, removed in edits:
            at %= len(text) + 1
            text = text[:at] + inserted + text[at + removed :]
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        outcome = outcome_of(path, "unishard", None)
        if isinstance(outcome, Outcome):
            assert faults_of(outcome) == []

    holds()
