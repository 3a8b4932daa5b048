"""Placeholders that something else fills in: carried where nobody looks at the value, and named where a decision is
needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder, placeholders_in
from unishard.errors import ConfigError
from unishard.formats import Item, Outcome, translate

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
        ("${eval:${a.b} // ${c}}, ${A:-${B}}", ("${eval:${a.b} // ${c}}", "${A:-${B}}")),
        ("costs $5, US$A and $lower", ()),
        (5, ()),
        (None, ()),
    ],
)
def test_what_a_placeholder_is(value: object, found: tuple[str, ...]) -> None:
    assert placeholders_in(value) == found
    assert not is_placeholder(value)
    assert is_placeholder(" ${A} ")
    assert is_placeholder("${eval:${a} // ${b}}")


def test_what_must_be_given_to_hydra_is_a_placeholder() -> None:
    assert is_placeholder("???")
    assert not placeholders_in("what???")
    outcome = translate({"trainer": {"devices": "???", "strategy": "ddp", "max_epochs": "???"}}, "unishard")
    assert item(outcome, "trainer.devices").fit is Fit.NEEDS_INPUT
    assert not outcome.of(Fit.UNSUPPORTED)


@pytest.mark.parametrize("document", [DEEPSPEED, ACCELERATE, ARGUMENTS])
@pytest.mark.parametrize("to", ["unishard", "deepspeed", "accelerate", "hf"])
def test_a_placeholder_is_no_reason_to_refuse(document: dict[str, object], to: str) -> None:
    assert not translate(document, to).of(Fit.UNSUPPORTED)


@pytest.mark.parametrize(
    ("document", "name"), [(DEEPSPEED, "deepspeed"), (ACCELERATE, "accelerate"), (ARGUMENTS, "hf")]
)
def test_in_its_own_format_it_stays(document: dict[str, object], name: str) -> None:
    outcome = translate(document, name)
    for one in outcome.items:
        if is_placeholder(one.value):
            assert (one.fit, one.becomes) == (Fit.EXACT, one.key)
            value: object = outcome.document
            for key in one.key.split("."):
                assert isinstance(value, dict)
                value = value[key]
            assert value == one.value


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
        translate(path, "hf")
        .reading.source.data["chat_template"]
        .startswith("{% for m in messages %}\nrole: {{ m.role }}")
    )
