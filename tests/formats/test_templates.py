"""Placeholders that something else fills in: carried where nobody looks at the value, and named where a decision is
needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder, placeholders_in
from unishard.errors import ConfigError
from unishard.formats import Item, Outcome, read, translate

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "${BATCH}",
    "fp16": {"enabled": "${oc.env:FP16}", "initial_scale_power": 12},
    "zero_optimization": {"stage": "$STAGE", "allgather_bucket_size": "{{ bucket }}"},
    "optimizer": {"type": "AdamW", "params": {"lr": "{{ lr }}", "betas": [0.9, "${B2}"]}},
    "steps_per_print": "${EVERY}",
    "tensorboard": {"output_path": "${OUT}/tb"},
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": "${WORLD}",
    "main_process_port": "$PORT",
    "mixed_precision": "${MP}",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "${R}", "fsdp_offload_params": "{{ offload }}"},
}
ARGUMENTS = {
    "per_device_train_batch_size": "${BATCH}",
    "learning_rate": "${LR}",
    "max_steps": 10,
    "bf16": "{{ bf16 }}",
    "run_name": "$NAME",
}


def item(outcome: Outcome, key: str) -> Item:
    (found,) = [one for one in outcome.items if one.key == key]
    return found


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("${A}/b/$C", ("${A}", "$C")),
        ("{{ x }}-{{ x }}", ("{{ x }}",)),
        ("costs $5, US$A and $lower", ()),
        (5, ()),
        (None, ()),
    ],
)
def test_what_a_placeholder_is(value: object, found: tuple[str, ...]) -> None:
    assert placeholders_in(value) == found
    assert not is_placeholder(value)
    assert is_placeholder(" ${A} ")


@pytest.mark.parametrize("document", [DEEPSPEED, ACCELERATE, ARGUMENTS])
@pytest.mark.parametrize("to", ["unishard", "deepspeed", "accelerate", "hf"])
def test_a_placeholder_is_no_reason_to_refuse(document: dict[str, object], to: str) -> None:
    assert not translate(document, to).of(Fit.UNSUPPORTED)


def test_where_a_value_is_needed_the_placeholder_is_named_and_set_decides() -> None:
    outcome = translate(DEEPSPEED, "unishard")
    assert set(outcome.reading.undecided) == {
        "training.micro_batch_size",
        "precision.compute",
        "precision.reduce",
        "sharding.strategy",
        "optimizer.lr",
        "optimizer.betas",
    }
    found = item(outcome, "zero_optimization.stage")
    assert (found.fit, found.becomes) == (Fit.NEEDS_INPUT, "sharding.strategy")
    assert "the value comes from the placeholder $STAGE" in found.note
    assert outcome.document["training"]["micro_batch_size"] == "${training.micro_batch_size}"
    assert read(DEEPSPEED, overrides=["sharding.strategy=full_shard"]).config.sharding.strategy == "full_shard"


def test_where_nobody_looks_at_the_value_it_is_carried() -> None:
    for key in ("steps_per_print", "zero_optimization.allgather_bucket_size"):
        assert "kept as it is" in item(translate(DEEPSPEED, "unishard"), key).note
    assert item(translate(ACCELERATE, "unishard"), "main_process_port").fit is Fit.IGNORED


@pytest.mark.parametrize(
    ("document", "name"), [(DEEPSPEED, "deepspeed"), (ACCELERATE, "accelerate"), (ARGUMENTS, "hf")]
)
def test_in_its_own_format_it_stays(document: dict[str, object], name: str) -> None:
    outcome = translate(document, name)
    for one in outcome.items:
        if is_placeholder(one.value):
            assert (one.fit, one.note) == (Fit.EXACT, "kept")
            value: object = outcome.document
            for key in one.key.split("."):
                assert isinstance(value, dict)
                value = value[key]
            assert value == one.value


def test_text_with_a_placeholder_is_carried_and_named_where_unishard_would_read_it() -> None:
    outcome = translate({**ARGUMENTS, "output_dir": "${OUT}/run"}, "unishard")
    assert outcome.document["checkpoint"]["dir"] == "${OUT}/run"
    assert item(outcome, "output_dir").fit is Fit.NEEDS_INPUT
    assert (
        "holds ${OUT}, which unishard does not fill in; write the value, or add --set checkpoint.dir=..."
        in item(outcome, "output_dir").note
    )
    assert translate({**ARGUMENTS, "output_dir": "${OUT}/run"}, "hf").document["output_dir"] == "${OUT}/run"


def test_a_key_that_depends_on_a_placeholder_elsewhere_is_open_too() -> None:
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}
    found = item(translate({**ARGUMENTS, **schedule}, "unishard"), "lr_scheduler_type")
    assert found.fit is Fit.NEEDS_INPUT
    assert "${LR}" in found.note


JINJA = """{
  "train_micro_batch_size_per_gpu": {{ batch }},
  "zero_optimization": {"stage": {{ stage | int }}, "overlap_comm": true},
  "optimizer": {"type": "AdamW", "params": {"betas": [{{ b1 }}, {{ b2 }}]}}
}
"""


def test_values_of_jinja_without_quotes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(JINJA)
    outcome = translate(path, "unishard")
    assert item(outcome, "zero_optimization.stage").value == "{{ stage | int }}"
    assert item(outcome, "zero_optimization.stage").line == 3
    assert item(outcome, "optimizer.params.betas").value == ["{{ b1 }}", "{{ b2 }}"]
    accelerate = tmp_path / "a.yaml"
    accelerate.write_text(
        "distributed_type: FSDP\nnum_processes: {{ n }}  # all\nmixed_precision: {{ mp }}\nfsdp_config: {fsdp_version: "
        "2}\n"
    )
    assert item(translate(accelerate, "unishard"), "num_processes").value == "{{ n }}"


def test_statements_of_jinja_are_named(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 1\n{% if fp16 %}\nfp16: true\n{% endif %}\n")
    with pytest.raises(
        ConfigError, match=r"args\.yaml:2: is a Jinja template \({% if fp16 %}\); render it, and translate the result"
    ):
        translate(path, "unishard")


def test_jinja_inside_text_is_text(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(
        "per_device_train_batch_size: 1\nchat_template: |\n  {% for m in messages %}\n  role: {{ m.role }}\n  {% "
        "endfor %}\n"
    )
    assert (
        translate(path, "unishard")
        .reading.source.data["chat_template"]
        .startswith("{% for m in messages %}\nrole: {{ m.role }}")
    )


SED = {
    "train_batch_size": "GBSIZE",
    "train_micro_batch_size_per_gpu": "CONFIG_MBSIZE",
    "steps_per_print": "LOG_INTERVAL",
    "fp16": {"enabled": "FP16_ENABLE", "initial_scale_power": 12},
    "zero_optimization": {"stage": "ZERO_STAGE", "overlap_comm": "OVERLAP"},
    "prescale_gradients": "PRESCALE_GRAD",
}
"""A template of which a script replaces the words (sed) before it starts DeepSpeed."""


def test_words_that_a_script_replaces_are_placeholders() -> None:
    outcome = translate(SED, "unishard", from_="deepspeed")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert outcome.reading.undecided["sharding.strategy"].who == "the placeholder ZERO_STAGE"
    assert outcome.reading.undecided["training.micro_batch_size"].who == "the placeholder CONFIG_MBSIZE"
    assert "precision.compute" in outcome.reading.undecided
    assert item(outcome, "steps_per_print").fit is Fit.IGNORED
    assert translate(SED, "deepspeed", from_="deepspeed").document == SED
    decided = translate(SED, "deepspeed", from_="deepspeed", overrides=["training.micro_batch_size=4"]).document
    assert decided == {**SED, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize("word", ["NONE", "TRUE5x", "Auto", "INFINITY", "B2", "big", "AUTO"])
def test_other_words_in_the_place_of_a_number_are_refused(word: str) -> None:
    document = {**SED, "train_micro_batch_size_per_gpu": word}
    assert (
        item(translate(document, "unishard", from_="deepspeed"), "train_micro_batch_size_per_gpu").fit
        is Fit.UNSUPPORTED
    )
