"""`offload.activations` in the words of tools that have some, and what is said where they have none."""

from __future__ import annotations

import pytest

from unishard.contract.rules import Fit
from unishard.formats import read, translate

FIELD = "offload.activations"
ARGUMENTS = {"per_device_train_batch_size": 1, "output_dir": "o", "max_steps": 10, "model_name_or_path": "m"}
RECOMPUTED = {"activation_checkpointing": "full", "offload": {"activations": "cpu"}}
ONLY_MOVED = {"offload": {"activations": "cpu"}}


def written(to, sections, backend="deepspeed"):
    """The document, and how well it says the field."""
    outcome = translate({"backend": backend, "sharding": "full_shard", **sections}, to, from_="unishard")
    (item,) = [item for item in outcome.items if item.key == FIELD or item.key == "offload"]
    return outcome.document, item


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("sections", [RECOMPUTED, ONLY_MOVED])
def test_trl_has_a_switch(backend, sections):
    document, item = written("trl", sections, backend)
    assert item.fit is Fit.EXACT
    assert document["activation_offloading"] is True
    assert "offload" not in document.get("gradient_checkpointing_kwargs", {})
    assert read({**ARGUMENTS, **document, "dataset_name": "d"}, "trl").config.offload.activations == "cpu"


def test_accelerate_offloads_what_recomputation_keeps():
    document, item = written("accelerate", RECOMPUTED, "fsdp")
    assert item.fit is Fit.EXACT
    assert document["fsdp_config"]["fsdp_activation_checkpointing_offload"] is True
    assert read(document, "accelerate").config.offload.activations == "cpu"


def test_transformers_offloads_what_recomputation_keeps():
    document, item = written("hf", RECOMPUTED)
    assert item.fit is Fit.EXACT
    assert document["activation_checkpointing_kwargs"] == {"use_reentrant": False, "offload": True}


@pytest.mark.parametrize(
    ("to", "sections", "backend", "fit", "said"),
    [
        ("accelerate", ONLY_MOVED, "fsdp", Fit.NEEDS_INPUT, "save_on_cpu"),
        ("accelerate", RECOMPUTED, "deepspeed", Fit.NEEDS_INPUT, "save_on_cpu"),
        ("hf", ONLY_MOVED, "deepspeed", Fit.NEEDS_INPUT, "save_on_cpu"),
        ("hf", RECOMPUTED, "fsdp", Fit.NEEDS_INPUT, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true"),
        ("deepspeed", RECOMPUTED, "deepspeed", Fit.NEEDS_INPUT, "save_on_cpu"),
        ("llamafactory", RECOMPUTED, "deepspeed", Fit.APPROXIMATE, "stay on the device"),
    ],
)
def test_what_a_tool_cannot_say_is_said(to, sections, backend, fit, said):
    _, item = written(to, sections, backend)
    assert item.fit is fit
    assert said in item.note


def test_a_switch_that_is_off_asks_for_nothing():
    for to in ("trl", "hf", "accelerate", "llamafactory"):
        document = translate({"backend": "fsdp", "sharding": "full_shard"}, to, from_="unishard").document
        assert "offload" not in str(document.get("gradient_checkpointing_kwargs", ""))
        assert "activation_offloading" not in document
