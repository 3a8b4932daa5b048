from __future__ import annotations

from typing import Any

import pytest

from unishard import Config, Topology
from unishard.config.nested import nested
from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect, Undecided, interpret
from unishard.contract.key_rows import boolean, drops, integer, refuses, sets
from unishard.contract.render import render
from unishard.contract.rules import Fit, Rule, When

WHO = "per_device_train_batch_size of the TrainingArguments"


def depends(value: Any, given: DocumentValues) -> KeyEffect:
    return (
        KeyEffect(fields={"training.seed": given.get("seed.base") + value})
        if "seed.base" in given
        else KeyEffect(Fit.IGNORED, "no base")
    )


KEYS = {
    "batch": sets("training.micro_batch_size", integer(1), auto=WHO),
    "zero.stage": drops("says nothing here"),
    "zero.offload": refuses("cannot be had; remove it", off=lambda value: not boolean(value)),
    "clip": sets("training.gradient_clipping", float, tool_default=1.0),
    "mapping": Key(lambda value, given: KeyEffect(fields={"native": value}), ("native",)),
    "seed.base": drops("is added"),
    "seed.more": Key(depends),
}


def read(document: dict[str, Any], **more: Any) -> dict[str, Entry]:
    entries = interpret(KEYS, document, tool="Tool 1.0", **more)
    assert len({entry.path for entry in entries}) == len(entries)
    return {entry.key: entry for entry in entries}


def test_each_key_is_one_entry_with_what_it_means() -> None:
    found = read({"batch": "4", "zero": {"stage": 2, "offload": "no"}, "mapping": {"a": {"b": 1}}})
    assert found["batch"].effect == KeyEffect(fields={"training.micro_batch_size": 4})
    assert found["zero.stage"].effect.fit is Fit.IGNORED
    assert (found["zero.offload"].effect.fit, found["zero.offload"].effect.note) == (Fit.IGNORED, "is off")
    assert found["mapping"].value == {"a": {"b": 1}}
    assert [key for key, entry in found.items() if entry.assumed] == ["clip"]


def test_what_a_tool_assumes_yields_to_what_is_written_and_to_the_tool_around_it() -> None:
    assert read({})["clip"].value == 1.0
    assert read({}, defaults={"clip": 0.5})["clip"].value == 0.5
    assert not read({"clip": 2.0}, defaults={"clip": 0.5})["clip"].assumed


def test_auto_is_undecided_and_a_wrong_value_refused_with_what_to_write() -> None:
    effect = read({"batch": "auto"})["batch"].effect
    assert (effect.fit, effect.fields) == (Fit.NEEDS_INPUT, {"training.micro_batch_size": Undecided(WHO)})
    assert WHO in effect.note
    wrong = read({"batch": [4]})["batch"].effect
    assert (wrong.fit, wrong.note) == (Fit.UNSUPPORTED, "must be a whole number of at least 1, got [4]; write one")
    assert wrong.fields == {}


def test_a_key_sees_the_others() -> None:
    assert read({"seed": {"base": 40, "more": 2}})["seed.more"].effect.fields == {"training.seed": 42}
    assert read({"seed": {"more": 2}})["seed.more"].effect.note == "no base"


@pytest.mark.parametrize(
    ("document", "key", "note"),
    [
        ({"bach": 1}, "bach", "Tool 1.0 does not know this key; did you mean 'batch'?"),
        ({"stage": 1}, "stage", "Tool 1.0 does not know this key; did you mean 'zero.stage'?"),
        ({"zero": {"stagee": 1}}, "zero.stagee", "Tool 1.0 does not know this key; did you mean 'stage'?"),
        ({"xyz": {"inner": 1}}, "xyz.inner", "Tool 1.0 does not know this key; remove it"),
        ({"zero": True}, "zero", "must be a mapping of keys (stage, offload), got true; write them below it"),
        ({"zero.stage": 1}, "zero.stage", "Tool 1.0 does not know this key"),
        ({"batch": {"x": 1}}, "batch", "must be a whole number of at least 1, got {x: 1}; write one"),
    ],
)
def test_keys_that_are_refused(document: dict[str, Any], key: str, note: str) -> None:
    found = read(document)[key]
    assert found.effect.fit is Fit.UNSUPPORTED
    assert note in found.effect.note
    assert ";" in found.effect.note


def test_a_key_that_the_tool_overlooks_is_dropped_and_kept() -> None:
    effect = read({"bach": 1}, ignores_unknown=True)["bach"].effect
    assert (effect.fit, effect.copy_verbatim) == (Fit.IGNORED, True)
    assert "ignores it; did you mean 'batch'?" in effect.note
    some = read({"x": 1, "zero": {"y": 1}}, ignores_unknown=lambda key: "." not in key)
    assert [some["x"].effect.fit, some["zero.y"].effect.fit] == [Fit.IGNORED, Fit.UNSUPPORTED]


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_block_that_holds_nothing_is_dropped(nothing: Any) -> None:
    effect = read({"zero": nothing})["zero"].effect
    assert (effect.fit, effect.note) == (Fit.IGNORED, "holds nothing")


def test_fits_are_ordered() -> None:
    assert [fit.severity for fit in Fit] == list(range(6))


def test_an_entry_that_is_refused_decides_nothing_any_more() -> None:
    entry = Entry(("a",), 1, KeyEffect(fields={"training.seed": 1}, native={"fsdp.x": 1}))
    refused = entry.but(Fit.UNSUPPORTED, "why; what")
    assert (refused.effect.fields, refused.effect.native) == ({}, {})
    assert entry.but(Fit.APPROXIMATE, "so").effect.fields == {"training.seed": 1}
    assert entry.at("b", "c").key == "b.c"


RULES = {
    "training.seed": Rule(
        Fit.NEEDS_INPUT, "your training script", "write torch.manual_seed", lambda cfg, topology: {"seed": 1}
    ),
    "training.micro_batch_size": Rule(
        Fit.EXACT,
        "batch.size",
        to=lambda cfg, topology: nested({"batch.size": cfg.training.micro_batch_size}),
        auto=True,
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "clip",
        to=lambda cfg, topology: {"clip": cfg.training.gradient_clipping},
        when=(
            When(
                "none",
                lambda cfg: cfg.training.gradient_clipping is None,
                Fit.UNSUPPORTED,
                "always clips; write a number",
            ),
        ),
    ),
    "optimizer.lr": Rule(Fit.EXACT, "lr", to=lambda cfg, topology: {"lr": cfg.optimizer.lr}),
}


def test_fields_become_fragments_of_one_document() -> None:
    cfg = Config.model_validate(
        {"training": {"micro_batch_size": 3, "gradient_clipping": 0.5}, "optimizer": {"lr": 0.1}}
    )
    document, words = render(RULES, cfg, Topology())
    assert document == {"batch": {"size": 3}, "clip": 0.5, "lr": 0.1}
    assert words["training.seed"].fit is Fit.NEEDS_INPUT
    assert words["training.gradient_clipping"].key == "clip"


def test_an_exception_counts_more_than_its_row_and_what_is_refused_is_not_written() -> None:
    document, words = render(RULES, Config.model_validate({"training": {"gradient_clipping": None}}), Topology())
    assert "clip" not in document
    assert words["training.gradient_clipping"].note == "always clips; write a number"


def test_what_the_script_decides_is_auto_where_the_format_has_that_word_and_left_out_elsewhere() -> None:
    undecided = {"training.micro_batch_size", "training.seed", "optimizer.lr"}
    document, words = render(RULES, Config(), Topology(), undecided)
    assert document["batch"] == {"size": "auto"}
    assert "lr" not in document
    assert words["training.micro_batch_size"].fit is Fit.NEEDS_INPUT
    assert words["training.seed"].fit is Fit.EXACT, "the script goes on doing what the format has no key for"
    assert words["optimizer.lr"].fit is Fit.NEEDS_INPUT
    assert "write the value" in words["optimizer.lr"].note
