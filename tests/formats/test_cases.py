"""Runs `cases/*.yaml`: what a document of a tool means, and what becomes of it in another format.

A file has the cases of one tool, or of one subject, in lists under a sentence; `from` beside them holds for all. Of a
case,

- `source` is the document, changed on top of one of the file's `bases` if it names one; `from`, `to` (unishard if left
  out), `set` and `topology` (all ranks, and those of a host) are the arguments of the translation;
- `keys` has what the report says of a key: its fit and parts of its note, or more of an item by name;
- `config`, `document` and `asks` have values by path, of the config, of the document that is written, and of who
  decides what the source leaves open;
- the rest is named as the attributes of `Outcome` and `ReadDocument`.

A text that begins with "= " is all of a note, and any other a part of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from unishard.config import value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import Item, Outcome, read, translate

FOLDER = Path(__file__).parent / "cases"
READING = (
    "ranks",
    "format",
    "decided",
    "undecided",
    "not decided",
    "not undecided",
    "open",
    "decides",
    "asks",
    "config",
)


def cases() -> Iterator[Any]:
    for file in sorted(FOLDER.glob("*.yaml")):
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        defaults = {"from": found["from"]} if "from" in found else {}
        for sentence, listed in found["cases"].items():
            for number, case in enumerate(listed):
                source = (
                    {**found["bases"][case["base"]], **case.get("source", {})} if "base" in case else case["source"]
                )
                yield pytest.param(
                    {**defaults, **case, "source": source}, id=f"{file.stem}-{sentence.replace(' ', '_')}-{number}"
                )


def plain(value: Any) -> Any:
    """As YAML says it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def says(text: str, parts: str | list[str]) -> bool:
    return all(
        text == part.removeprefix("= ") if part.startswith("= ") else part in text
        for part in ([parts] if isinstance(parts, str) else parts)
    )


def at(document: Any, path: str) -> Any:
    """The value at a path; the document itself at the empty one."""
    for name in path.split("/") if path else ():
        document = document[int(name) if isinstance(document, list) else name]
    return plain(document)


def has(document: Any, path: str) -> bool:
    try:
        at(document, path)
    except KeyError:
        return False
    return True


def check_item(items: dict[str, list[Item]], key: str, expected: Any) -> None:
    if isinstance(expected, str | list):
        fit, *note = [expected] if isinstance(expected, str) else expected
        expected = {"fit": fit, "note": note}
    assert any(
        all(
            says(item.note, value) if name == "note" else plain(getattr(item, name)) == value
            for name, value in expected.items()
        )
        for item in items[key]
    ), items[key]


@pytest.mark.parametrize("case", [*cases()])
def test_case(case: dict[str, Any]) -> None:
    topology = Topology(*case["topology"]) if "topology" in case else None
    options = {"from_": case.get("from"), "overrides": case.get("set", ()), "topology": topology}
    to = case.get("to", "unishard")
    asked = case.keys() - {"base", "source", "from", "to", "set", "topology"}
    outcome: Outcome | None = translate(case["source"], to, **options) if asked - set(READING) else None
    reading = outcome.reading if outcome else read(case["source"], **options)
    found = {
        "ranks": lambda _: reading.topology and [reading.topology.world_size, reading.topology.local_world_size],
        "format": lambda _: reading.format,
        "decided": lambda names: [name for name in names if name in reading.decided],
        "undecided": lambda names: [name for name in names if name in reading.undecided],
        "not decided": lambda names: [name for name in names if name not in reading.decided],
        "not undecided": lambda names: [name for name in names if name not in reading.undecided],
        "open": lambda _: sorted(reading.undecided),
        "decides": lambda _: {
            path: plain(value_at(reading.config, path)) for path in reading.decided if path not in reading.undecided
        },
        "config": lambda values: {path: plain(value_at(reading.config, path)) for path in values},
        "document": lambda values: {path: at(outcome.document, path) for path in values},
        "absent": lambda paths: [path for path in paths if not has(outcome.document, path)],
        "of": lambda fits: {fit: [item.key for item in outcome.of(Fit(fit))] for fit in fits},
        "status": lambda how: {name: outcome.status(strict=name == "strict") for name in how},
        "warnings": lambda _: list(outcome.warnings),
    }
    for what in asked:
        if what == "keys":
            items: dict[str, list[Item]] = {}
            for item in outcome.items:
                items.setdefault(item.key, []).append(item)
            for key, expected in case["keys"].items():
                check_item(items, key, expected)
        elif what == "asks":
            assert all(says(reading.undecided[path].who, who) for path, who in case["asks"].items())
        elif what in ("text", "launch"):
            assert says(getattr(outcome, what), case[what])
        else:
            assert found[what](case[what]) == case[what], what
