"""The table of DeepSpeed's keys: each row is consistent, and says the same wherever a user meets its key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unishard.config import Config, leaves
from unishard.config.nested import flat, nested
from unishard.config.topology import Topology
from unishard.contract.entries import NOTHING, Unreadable
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import translate as convert
from unishard_arguments.deepspeed import ARGUMENTS
from unishard_deepspeed import backend
from unishard_deepspeed.keys import CONSTANTS, ROWS, Row, Use, spellings, used
from unishard_deepspeed.native import check, fit

TAKEN = {key: row for key, row in used(Use.LOG, Use.SAME, Use.OTHER).items() if key != "timers.throughput.enabled"}
SAMPLES = {bool: True, int: 3, float: 2.0, str: "error", list: ["norm"], dict: {}}


def sample(row: Row) -> Any:
    """A value that the key takes, other than the one that unishard writes."""
    return SAMPLES[float if float in row.values.types else row.values.types[0]]


def native(key: str, value: Any) -> Any:
    return backend.translate(Config.model_validate({"native": {"deepspeed": nested({key: value})}}), Topology())


def test_a_constant_is_a_value_that_the_key_takes() -> None:
    for key in TAKEN:
        if ROWS[key].constant is not NOTHING:
            assert check(nested({key: ROWS[key].constant})) == []


def test_deepspeed_takes_a_constant_and_its_reason_is_given() -> None:
    for key in CONSTANTS:
        row = ROWS[key]
        assert row.why
        if row.values.takes:
            row.values.takes(row.constant)


def test_a_constant_is_written_unless_something_decides_the_key() -> None:
    for key in CONSTANTS:
        value = CONSTANTS[key][0]
        written = dict(flat(backend.translate(Config(), Topology()).native))
        for name, part in flat(nested({key: value})):
            assert written[name] == part


def test_a_row_has_what_its_use_needs() -> None:
    for key in ROWS:
        row = ROWS[key]
        if row.use in (Use.REFUSED, Use.REMOVED):
            assert "; " in row.text, "why, and what instead"
        elif row.use is Use.DECIDED:
            assert not row.ignored
            assert set(row.text.split(" and ")) <= {*(path for path, _ in leaves(Config)), *Config.model_fields}
        else:
            assert not row.text
            assert row.values.types != (object,)
        for note in (row.why, row.ignored):
            assert len(note) <= 80, note


def test_the_field_that_a_refusal_names_is_the_one_that_a_config_sets_by_the_key() -> None:
    for key in [key for key in used(Use.DECIDED) if key != "train_batch_size"]:
        below = [
            row.fields
            for name, row in ARGUMENTS.keys.items()
            if row.fields and (name == key or name.startswith(f"{key}."))
        ]
        fields = {field for names in below for field in names}
        named = ROWS[key].text.split(" and ")
        assert not fields or any(field == name or field.startswith(f"{name}.") for field in fields for name in named), (
            fields
        )


def test_what_cannot_be_set_says_what_to_do_instead() -> None:
    for key in used(Use.DECIDED, Use.REFUSED, Use.REMOVED):
        above = next(name for at, name in enumerate(prefixes(key)) if name in ROWS)
        with pytest.raises(ConfigError) as caught:
            native(key, {} if above != key else 1)
        (problem,) = caught.value.problems
        assert problem.path == f"native.deepspeed.{above}"
        assert ROWS[above].text in problem.what


def prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def test_what_can_be_set_is_merged_last_and_has_a_line() -> None:
    for key in TAKEN:
        translation = native(key, sample(ROWS[key]))
        line = translation.report.lines[-1]
        assert (line.path, line.value, line.fit) == (f"native.deepspeed.{key}", sample(ROWS[key]), fit(key)[0])
        assert dict(flat(translation.native)).get(key, {}) == sample(ROWS[key]) or key == "timers"


def test_a_value_of_another_type_is_refused() -> None:
    for key in TAKEN:
        with pytest.raises(ConfigError, match="must be "):
            native(key, object if float in ROWS[key].values.types else math.pi)


def test_a_key_is_judged_alike_under_native_and_in_a_config_of_deepspeed() -> None:
    for key in TAKEN:
        lost = {Fit.EQUIVALENT: Fit.IGNORED, Fit.APPROXIMATE: Fit.APPROXIMATE}[fit(key)[0]]
        for name in spellings(key):
            assert ARGUMENTS.keys[name].fit is lost or ARGUMENTS.keys[name].fields, (
                name
            )  # one that decides fields is translated through them


def test_a_key_that_only_deepspeed_has_comes_back_as_a_native_setting() -> None:
    document = {
        "zero_optimization": {"stage": 1, "memory_efficient_linear": True, "zero_quantized_weights": True},
        "prescale_gradients": True,
    }
    items = {
        item.key: item.fit
        for item in convert(document, "unishard", from_="deepspeed", overrides=("backend=fsdp",)).items
    }
    assert items["prescale_gradients"] is items["zero_optimization.memory_efficient_linear"] is Fit.IGNORED
    assert items["zero_optimization.zero_quantized_weights"] is Fit.APPROXIMATE
    config = convert(document, "unishard", from_="deepspeed").reading.config
    assert set(dict(flat(dict(config.native["deepspeed"])))) == items.keys() & {
        key for key in ROWS if ROWS[key].use in (Use.SAME, Use.OTHER)
    }


@pytest.mark.parametrize("value", ["norm", 3, [1], {}])
def test_dtypes_of_buffers_are_a_list_of_names(value: Any) -> None:
    values = ROWS["data_types.keep_in_fp32_modules"].values
    assert values.takes
    with pytest.raises(Unreadable):
        values.takes(value)
    document = {"data_types": {"keep_in_fp32_modules": value}}
    (item,) = [
        item
        for item in convert(document, "deepspeed", from_="deepspeed").items
        if item.key.startswith("data_types.keep")
    ]
    assert item.fit is Fit.UNSUPPORTED
