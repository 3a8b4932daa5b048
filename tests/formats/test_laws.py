"""Laws of translations between any two formats: what a way there and back changes is named, and a second translation
changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accounting import WRITTEN, changed_fits, spelled_out, unlike_itself
from documents import SEEDS
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import documents

from unishard import ConfigError
from unishard.config import Config, leaves, value_at
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import Outcome, catalog, translate
from unishard.formats.report.readback import Join, read_back
from unishard.formats.verify import read_settings

EIGHT = Topology(world_size=8, local_world_size=4)
ASKED = ("deepspeed", "hf", "accelerate")
"""Formats whose tools say what they make of a file."""
IMPLIED = {
    "sharding.strategy": ("sharding.reshard_after_forward", "sharding.group_size"),
    "precision.compute": ("precision.loss_scale",),
    "precision.master": ("precision.compute", "precision.reduce"),
    "offload.optimizer": ("offload.params",),
    "offload.params": ("offload.optimizer",),
}

CHANGES: dict[str, list[Any]] = {
    "backend": ["fsdp", "deepspeed"],
    "sharding.strategy": ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"],
    "precision.compute": ["bf16", "fp16", "fp32"],
    "training.micro_batch_size": [1, 3],
    "training.gradient_accumulation_steps": [1, 4],
    "training.gradient_clipping": [0.5, 1.0, "null"],
    "optimizer.lr": [1e-5, 3e-4],
    "activation_checkpointing": ["none", "full"],
}
overrides = st.fixed_dictionaries(
    {}, optional={field: st.sampled_from(values) for field, values in CHANGES.items()}
).map(lambda chosen: [f"{field}={value}" for field, value in chosen.items()])


def translated(document: Any, to: str, from_: str, changed: list[str] | None = None) -> Outcome | None:
    """The translation; None where it is refused."""
    try:
        outcome = translate(document, to, from_=from_, topology=EIGHT, overrides=changed or [])
    except ConfigError:
        return None
    return None if outcome.of(Fit.UNSUPPORTED) else outcome


def named(outcome: Outcome) -> set[str]:
    """The fields of which a report says that they are not kept as they are."""
    fields = {change.field for change in outcome.changes}
    for item in outcome.items:
        if item.fit is not Fit.EXACT:
            fields |= {*item.entry.effect.fields, *(f"native.{key}" for key in item.entry.effect.native)}
    return fields | {other for field in fields for other in IMPLIED.get(field, ())}


def near(one: Any, other: Any) -> bool:
    """Whether two values are the same; a rate may be another product of the same numbers."""
    return one == (pytest.approx(other, rel=1e-9) if isinstance(other, float) else other)


@st.composite
def first_translations(draw: st.DrawFn, to: str) -> Outcome | None:
    from_ = draw(st.sampled_from(sorted(SEEDS)))
    return translated(draw(st.sampled_from(SEEDS[from_])), to, from_, draw(overrides))


@pytest.mark.parametrize("to", WRITTEN)
def test_what_a_way_there_and_back_changes_is_named(to: str) -> None:
    @settings(max_examples=8)
    @given(first_translations(to))
    def holds(there: Outcome | None) -> None:
        origin = there.reading.format if there else ""
        again = translated(there.document, origin, to) if there and origin in WRITTEN else None
        if there is None or again is None:
            return
        back = read_back(catalog.get(origin), again.document, again.reading)
        lost = {
            path
            for path, one in Join(there.reading, {}, back).different.items()
            if one.before.said and not path.startswith("native.")
        }
        assert lost - {"backend"} <= named(there) | named(again)  # `--to deepspeed` asks for the engine

    holds()


@pytest.mark.parametrize("to", [name for name in WRITTEN if name != "unishard"])
def test_what_a_config_says_exactly_comes_back(to: str) -> None:
    @settings(max_examples=24)
    @given(documents())
    def holds(document: dict[str, Any]) -> None:
        there = translate(document, to, from_="unishard", topology=EIGHT, overrides=["strict=false"])
        back = read_back(catalog.get(to), there.document, there.reading)
        exact = {item.key for item in there.items if item.fit is Fit.EXACT and not item.assumed} - named(there)
        # `--to deepspeed` asks for the engine; of DeepSpeed's defaults, Accelerate's FSDP2 has no other format to add up in.
        elsewhere = {"backend", *(["precision.accumulate"] if to == "accelerate" else [])}
        kept = [path for path, _ in leaves(Config) if path in (exact & back.decided) - elsewhere]
        values = {path: (value_at(there.reading.config, path), value_at(back.config, path)) for path in kept}
        assert {path: both for path, both in values.items() if not near(*both)} == {}

    holds()


@pytest.mark.parametrize("to", WRITTEN)
def test_what_was_written_once_is_written_alike_again(to: str) -> None:
    @settings(max_examples=4)
    @given(first_translations(to))
    def holds(once: Outcome | None) -> None:
        if once is not None and not any(" refuses " in warning for warning in once.warnings):
            twice = translated(once.document, to, to)
            assert twice is not None
            assert dict(flat(twice.document)) == dict(flat(once.document))

    holds()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_in_its_own_format_is_itself(name: str) -> None:
    for document in SEEDS[name]:
        outcome = translate(document, name, from_=name)
        if not outcome.of(Fit.UNSUPPORTED) and catalog.get(name).stays_in_place(outcome.reading.source):
            assert unlike_itself(outcome) == []


def test_a_word_that_an_override_leaves_as_it_is_stays() -> None:
    """`reshard_after_forward: false` is Accelerate's nearest to `shard_grad_op` as well."""
    block = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    document = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": block}
    outcome = translate(document, "accelerate", overrides=["sharding.strategy=shard_grad_op"])
    assert outcome.document == document


def test_a_file_that_is_named_is_written_out_whole_once_a_key_of_its_own_changes(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    arguments = {"per_device_train_batch_size": 4, "bf16": True, "output_dir": "out", "deepspeed": "zero.json"}
    (tmp_path / "a.json").write_text(json.dumps(arguments))
    outcome = translate(tmp_path / "a.json", "hf", overrides=["training.nonfinite=ignore"])
    written, inside = outcome.document, outcome.document["deepspeed"]
    assert arguments.keys() == written.keys() - {"max_grad_norm"}
    assert inside["zero_optimization"].items() >= zero["zero_optimization"].items()
    assert inside["bf16"] == {"enabled": "auto", "check_grad_overflow": False}
    beside = translate(tmp_path / "a.json", "hf", overrides=["optimizer.lr=0.5"])
    assert beside.document == {**arguments, "learning_rate": 0.5}


@pytest.mark.parametrize("to", WRITTEN)
def test_spelling_out_a_default_never_changes_its_fit(to: str) -> None:
    for from_ in sorted(SEEDS.keys() - {"unishard"}):
        for silent in filter(None, (translated(document, to, from_) for document in SEEDS[from_])):
            spelled = translated(spelled_out(silent.reading), to, from_)
            changed = changed_fits(silent, spelled) if spelled else []
            assert changed == []


@pytest.mark.parametrize("to", ASKED)
def test_its_tool_makes_the_same_of_what_is_written_again(to: str) -> None:
    @settings(max_examples=3)
    @given(first_translations(to), st.sampled_from(ASKED[:3]))
    def holds(once: Outcome | None, by: str) -> None:
        between = translated(once.document, by, to) if once else None
        again = translated(between.document, to, by) if between else None
        if once is None or between is None or again is None:
            return
        first, last = read_settings(once), read_settings(again)
        assert {first.refused, last.refused} == {""}
        other = {
            field
            for field in first.settings.keys() & last.settings.keys()
            if first.settings[field] != last.settings[field]
        }
        assert other <= named(once) | named(between) | named(again)

    holds()
