from __future__ import annotations

from typing import Any

import pytest

from unishard import ConfigError, Topology
from unishard.config.loading.placeholders import STAND_INS, placeholder, undecided_in
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.rules import Fit
from unishard.formats.files.source import open_source
from unishard.formats.reading.document import ReadDocument, assemble, default_of

WHO = Undecided("the script")


def entry(
    key: str, value: Any = 1, assumed: bool = False, native: dict[str, Any] | None = None, **fields: Any
) -> Entry:
    said = {name.replace("__", "."): field for name, field in fields.items()}
    return Entry(tuple(key.split(".")), value, KeyEffect(fields=said, native=native or {}), assumed)


def put(*entries: Entry, overrides: tuple[str, ...] = ()) -> ReadDocument:
    return assemble("some", open_source({}), entries, overrides=overrides, topology=Topology())


def notes(reading: ReadDocument) -> dict[str, str]:
    return {one.key: one.effect.note for one in reading.entries if one.effect.fit is Fit.UNSUPPORTED}


def test_fields_become_a_config() -> None:
    reading = put(entry("a", training__seed=3), entry("b", optimizer__lr=0.5, optimizer__name="sgd"))
    assert (reading.config.training.seed, reading.config.optimizer.name) == (3, "sgd")
    assert reading.decided == {"training.seed", "optimizer.lr", "optimizer.name"}
    assert not reading.undecided


def test_two_keys_may_say_the_same() -> None:
    assert notes(put(entry("a", training__seed=3), entry("b", training__seed=3))) == {}


def test_of_two_keys_that_contradict_each_other_the_later_is_refused() -> None:
    reading = put(entry("a", 3, training__seed=3), entry("b", 4, training__seed=4, optimizer__lr=0.1))
    assert notes(reading) == {"b": "contradicts a, which is 3; keep one of the two"}
    assert reading.config.training.seed == 3
    assert "optimizer.lr" not in reading.decided
    native = put(entry("a", native={"fsdp.x": 1}), entry("b", native={"fsdp.x": 2}))
    assert list(notes(native)) == ["b"]


def test_what_is_assumed_yields_wherever_it_stands() -> None:
    reading = put(
        entry("a", assumed=True, training__seed=1, training__micro_batch_size=2), entry("b", training__seed=3)
    )
    assert (reading.config.training.seed, reading.config.training.micro_batch_size) == (3, 2)
    assert notes(reading) == {}
    gone = put(entry("a", assumed=True, training__seed=1), entry("b", training__seed=3))
    assert [one.key for one in gone.entries] == ["b"]
    undecided = put(entry("a", assumed=True, training__seed=1), entry("b", "auto", training__seed=WHO))
    assert undecided.undecided == {"training.seed": WHO}


@pytest.mark.parametrize("first", [True, False])
def test_a_value_decides_what_another_key_leaves_to_the_script(first: bool) -> None:
    entries = [entry("a", "auto", training__seed=WHO), entry("b", training__seed=3)]
    reading = put(*(entries if first else entries[::-1]))
    assert notes(reading) == {}
    assert reading.config.training.seed == 3
    assert not reading.undecided
    twice = put(entry("a", "auto", training__seed=WHO), entry("b", "auto", training__seed=Undecided("another")))
    assert notes(twice) == {}
    assert set(twice.undecided) == {"training.seed"}


def test_an_override_decides_what_was_undecided_and_counts_more_than_the_document() -> None:
    reading = put(
        entry("a", "auto", training__micro_batch_size=WHO),
        entry("b", training__seed=1),
        overrides=("training.micro_batch_size=7",),
    )
    assert reading.config.training.micro_batch_size == 7
    assert not reading.undecided
    assert "training.micro_batch_size" in reading.decided
    whole = put(
        entry("a", "auto", scheduler__total_steps=WHO), overrides=("scheduler={name: linear, total_steps: 10}",)
    )
    assert not whole.undecided
    assert {"scheduler.name", "scheduler.total_steps"} <= whole.decided


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("training.micro_batch_size=x", "training.micro_batch_size: must be a whole number of at least 1"),
        ("training.micro=1", "unknown field"),
        ("training", "has no '='"),
        ("scheduler.name=linear", "scheduler.total_steps: is required by a linear schedule"),
    ],
)
def test_an_override_that_cannot_be_used(override: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace(".", r"\.")):
        put(entry("a", training__seed=1), overrides=(override,))


def test_what_the_schema_refuses_is_refused_at_its_key_and_the_rest_stands() -> None:
    reading = put(entry("lr", -1, optimizer__lr=-1.0), entry("seed", training__seed=5))
    assert notes(reading) == {"lr": "optimizer.lr must be a number of at least 0, got -1.0; write another value"}
    assert reading.config.training.seed == 5


def test_what_the_schema_refuses_between_fields_is_refused_at_the_field_it_names() -> None:
    reading = put(entry("stage", sharding__strategy="no_shard"), entry("offload", offload__optimizer="cpu"))
    assert list(notes(reading)) == ["offload"]
    assert "needs a sharded optimizer; choose" in notes(reading)["offload"]


def test_a_field_that_is_missing_is_the_fault_of_the_section_that_needs_it() -> None:
    reading = put(entry("kind", scheduler__name="linear"), entry("seed", training__seed=1))
    assert list(notes(reading)) == ["kind"]
    assert "scheduler.total_steps is required by a linear schedule" in notes(reading)["kind"]


def test_an_assumed_key_yields_where_it_is_as_much_at_fault_as_a_written_one() -> None:
    reading = put(
        entry("kind", scheduler__name="linear"),
        entry("steps", scheduler__total_steps=5),
        entry("warmup", assumed=True, scheduler__warmup_steps=9),
    )
    assert list(notes(reading)) in (["warmup"], [])
    assert reading.config.scheduler.name == "linear"


def test_what_is_assumed_and_the_schema_assumes_as_well_is_not_written() -> None:
    reading = put(
        entry("stage", sharding__strategy="no_shard"), entry("pin", assumed=True, sharding__min_unit_params=0)
    )
    assert notes(reading) == {}
    assert reading.config.sharding.model_fields_set == {"strategy"}


def test_settings_of_one_engine_are_kept() -> None:
    reading = put(
        entry("a", native={"deepspeed.zero_optimization.sub_group_size": 5}), entry("b", native={"fsdp.x": 1})
    )
    assert reading.config.native == {"deepspeed": {"zero_optimization": {"sub_group_size": 5}}, "fsdp": {"x": 1}}


def test_every_field_may_be_undecided() -> None:
    from unishard.config import Config, leaves

    for field, _ in leaves(Config):
        reading = assemble("some", open_source({}), [Entry(("x",), "auto", KeyEffect(fields={field: WHO}))])
        assert set(reading.undecided) == {field}
    linear = [Entry(("x",), "auto", KeyEffect(fields=dict.fromkeys(STAND_INS, WHO) | {"scheduler.name": "linear"}))]
    assert assemble("some", open_source({}), linear).config.scheduler.total_steps is not None


def test_placeholders() -> None:
    for field in ("training.seed", "precision.keep_fp32"):
        assert undecided_in(placeholder(field)) == field
    assert [undecided_in(value) for value in ("x", "${A}", 3, "${training.seed} ")] == [None] * 4


def test_a_default_may_depend_on_fields_beside_it() -> None:
    assert (
        default_of("precision.reduce", {"precision.compute": "bf16"}) == "bf16"
        or default_of("precision.reduce", {}) == "fp32"
    )
    assert default_of("training.seed", {}) == put().config.training.seed


def test_an_assumed_entry_is_never_refused() -> None:
    said = put(entry("a", precision__compute="fp16"), entry("b", assumed=True, precision__reduce="bf16"))
    assert [found.effect.fit for found in said.entries] == [Fit.EXACT, Fit.APPROXIMATE]
    assert "left out" in said.entries[1].effect.note
    clash = put(
        entry("a", precision__compute="fp16"),
        entry("b", precision__compute="bf16"),
        entry("c", assumed=True, precision__reduce="bf16"),
    )
    assert [found.key for found in clash.entries if found.effect.fit is Fit.UNSUPPORTED] == ["b"]
