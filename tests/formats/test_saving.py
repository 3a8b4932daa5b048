"""When and where a run is saved: what each tool's keys say of it, and how it is said in each tool's words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from unishard.config import value_at
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import Outcome, read, translate
from unishard.formats.report.items import Item

HF = {"per_device_train_batch_size": 4}


def decided(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of `checkpoint` that a document decides, without the section's name."""
    reading = read(document, name)
    paths = [path for path in reading.decided if path.startswith("checkpoint.") and path not in reading.undecided]
    return {path.partition(".")[2]: value_at(reading.config, path) for path in paths}


def item(outcome: Outcome, key: str) -> Item:
    (found,) = [item for item in outcome.items if item.key == key]
    return found


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, {}),
        ({"output_dir": "out"}, {"dir": "out", "every_steps": 500}),
        ({"output_dir": "out", "save_steps": 50}, {"dir": "out", "every_steps": 50}),
        ({"save_steps": 50}, {"dir": "trainer_output", "every_steps": 50}),
        ({"save_strategy": "steps"}, {"dir": "trainer_output", "every_steps": 500}),
        ({"output_dir": "out", "save_strategy": "steps", "save_steps": 20.0}, {"dir": "out", "every_steps": 20}),
        ({"output_dir": "out", "save_strategy": "no", "save_steps": 20}, {"dir": "out", "every_steps": None}),
        ({"output_dir": "out", "save_strategy": "epoch", "save_total_limit": 3}, {"dir": "out", "keep_last": 3}),
        ({"output_dir": "out", "save_strategy": "best"}, {"dir": "out"}),
        ({"output_dir": "out", "save_steps": 0.1, "max_steps": 55}, {"dir": "out", "every_steps": 6}),
        ({"output_dir": "out", "save_steps": 0.1, "max_steps": -1}, {"dir": "out"}),
        ({"output_dir": "out", "save_steps": 0}, {"dir": "out", "every_steps": None}),
        ({"save_total_limit": 0}, {"keep_last": None}),
        ({"output_dir": None, "save_total_limit": None, "enable_jit_checkpoint": False}, {}),
        ({"enable_jit_checkpoint": True}, {"dir": "trainer_output", "on_signal": ["SIGTERM"]}),
    ],
    ids=str,
)
def test_training_arguments_say(document: dict[str, Any], expected: dict[str, Any]) -> None:
    assert decided(HF | document, "hf") == expected


ASKED = (
    "output_dir",
    "save_strategy",
    "save_steps",
)


@pytest.mark.parametrize(
    ("document", "name", "key", "word"),
    [
        (HF | {"output_dir": "a", "save_strategy": "epoch"}, "hf", "save_strategy", "after epochs"),
        (HF | {"output_dir": "a", "save_strategy": "best"}, "hf", "save_strategy", "best evaluation so far"),
        (HF | {"output_dir": "a", "save_steps": 0.1}, "hf", "save_steps", "fraction of all steps"),
    ],
)
def test_what_only_the_data_or_an_evaluation_knows_is_left_to_the_script(
    document: dict[str, Any], name: str, key: str, word: str
) -> None:
    found = item(translate(document, "unishard", from_=name), key)
    assert found.fit is Fit.NEEDS_INPUT
    assert word in found.note
    assert re.search(r"engine\.save\((metric=\.\.\.)?\)|checkpoint\.every_steps", found.note)


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (HF | {"output_dir": "a", "save_strategy": "epoch"}, "hf"),
        (HF | {"output_dir": "a", "save_steps": 0.1}, "hf"),
    ],
)
def test_its_own_tool_keeps_what_is_left_to_the_script(document: dict[str, Any], name: str) -> None:
    again = translate(document, name, from_=name)
    assert again.status(strict=True) == 0
    assert dict(flat(again.document)).items() >= {key: value for key, value in flat(document) if key in ASKED}.items()


WHOLE = {"dir": "runs/a", "every_steps": 50, "keep_last": 3}
WRITTEN: dict[str, dict[str, Any]] = {
    "hf": {"output_dir": "runs/a", "save_strategy": "steps", "save_steps": 50, "save_total_limit": 3},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_usual_section_is_said_in_every_tools_words(name: str) -> None:
    outcome = translate({"checkpoint": WHOLE}, name, from_="unishard", topology=Topology(2, 2))
    assert WRITTEN[name].items() <= dict(flat(outcome.document)).items()
    for key in WHOLE:
        assert item(outcome, f"checkpoint.{key}").fit in (Fit.EXACT, Fit.EQUIVALENT)


NOTHING: dict[str, dict[str, Any]] = {
    "hf": {"save_strategy": "no"},
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_tool_that_would_save_by_itself_is_told_not_to(name: str) -> None:
    outcome = translate({"training": {"seed": 3}}, name, from_="unishard", topology=Topology(2, 2))
    assert NOTHING[name].items() <= dict(flat(outcome.document)).items()
    assert not any("folder" in key or "output_dir" in key or "callbacks" in key for key in dict(flat(outcome.document)))


def test_yaml_of_another_reader_keeps_no_a_word() -> None:
    assert yaml.safe_load(translate({}, "hf", from_="unishard").text)["save_strategy"] == "no"


@pytest.mark.parametrize("spared", ["keep_every", "keep_best"])
@pytest.mark.parametrize("name", WRITTEN)
def test_where_none_can_be_spared_all_are_kept_and_it_is_said(name: str, spared: str) -> None:
    document = {"checkpoint": {**WHOLE, spared: 100}}
    outcome = translate(document, name, from_="unishard", topology=Topology(2, 2))
    for key in ("keep_last", spared):
        found = item(outcome, f"checkpoint.{key}")
        assert found.fit is Fit.APPROXIMATE
        assert "all are kept" in found.note
    again = read(outcome.document, name).config.checkpoint
    assert (again.dir, again.every_steps, again.keep_last) == ("runs/a", 50, None)


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", ["accelerate", "deepspeed"])
def test_where_the_script_saves_the_report_says_so(name: str, backend: str) -> None:
    kept = {"keep_every": 100, "keep_best": 1, "best": "max"}
    checkpoint = {**WHOLE, **kept, "every_minutes": 5.0, "async_save": True, "on_signal": ["SIGTERM"]}
    outcome = translate(
        {"backend": "deepspeed" if name == "deepspeed" else backend, "checkpoint": checkpoint}, name, from_="unishard"
    )
    found = {key: item(outcome, f"checkpoint.{key}") for key in checkpoint}
    assert found.pop("async_save").fit is Fit.IGNORED
    assert {entry.fit for entry in found.values()} == {Fit.NEEDS_INPUT}
    assert {entry.becomes for entry in found.values()} == {"your training script"}
    call = "accelerator.save_state(...)" if name == "accelerate" else "engine.save_checkpoint(...)"
    assert call in found["every_steps"].note
    assert "runs/a" not in outcome.text


def test_a_directory_alone_saves_nothing_in_any_tool() -> None:
    document = {"checkpoint": "runs/a"}
    said = {name: dict(flat(translate(document, name, from_="unishard").document)) for name in WRITTEN}
    assert (said["hf"]["output_dir"], said["hf"]["save_strategy"]) == ("runs/a", "no")
