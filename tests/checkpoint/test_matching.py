"""What of a checkpoint is taken into a model that is not the one it was saved from."""

from __future__ import annotations

import pytest

from unishard.checkpoint.manifest import Manifest, ModelRecord, TensorFacts
from unishard.checkpoint.matching import Wanted, fit
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.errors import CheckpointError

ADAM = Wanted(frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"step"}))
SHAPES = {"body": [3, 4], "head": [5, 4]}


def saved():
    tensors = {f"model.{name}": shape for name, shape in SHAPES.items()}
    tensors |= {f"optim.state.{name}.{key}": shape for name, shape in SHAPES.items() for key in ADAM.tensors}
    tensors |= {f"optim.state.{name}.step": [] for name in SHAPES}
    return Manifest(
        written="2026-01-01T00:00:00+00:00",
        versions={},
        step=3,
        world_size=1,
        model=ModelRecord(class_name="Model", fingerprint="0" * 16, numel=32),
        optimizer=OptimizerFacts(class_name="AdamW", groups=[GroupRecord(names=list(SHAPES), options={})]),
        files={},
        tensors={name: TensorFacts(shape=shape, dtype="float32", hash="0" * 16) for name, shape in tensors.items()},
    )


def shapes(head):
    return {"model.body": [3, 4], "model.head": head}


def test_everything_fits_what_it_was_saved_from():
    found = fit(saved(), shapes([5, 4]), dict.fromkeys(SHAPES, ADAM), strict=True)
    assert set(found.model) == {"model.body", "model.head"}
    assert found.optimizer == dict.fromkeys(SHAPES, ADAM)
    assert found.notes == ()


@pytest.mark.parametrize("head", [[2, 4], [9, 4], [4, 5]])
def test_of_a_head_of_another_shape_neither_weights_nor_state_are_taken(head):
    with pytest.raises(CheckpointError, match="head: has shape"):
        fit(saved(), shapes(head), dict.fromkeys(SHAPES, ADAM), strict=True)
    found = fit(saved(), shapes(head), dict.fromkeys(SHAPES, ADAM), strict=False)
    assert found.model == ("model.body",)
    assert set(found.optimizer) == {"body"}
    assert any("optimizer state in the checkpoint has another shape" in note for note in found.notes)


def test_what_the_model_does_not_have_is_named():
    wanted = {"model.body": [3, 4]}, {"body": ADAM}
    with pytest.raises(CheckpointError, match="head: in the checkpoint, but not in the model"):
        fit(saved(), *wanted, strict=True)
    found = fit(saved(), *wanted, strict=False)
    assert found.model == ("model.body",)
    assert found.notes == ("head: in the checkpoint, but not in the model", "head: was trainable, but is not now")


def test_another_name_of_a_tied_tensor_is_no_surplus():
    tied = saved()
    tied = tied.model_copy(
        update={"ties": {"alias": "body"}, "tensors": tied.tensors | {"model.alias": tied.tensors["model.body"]}}
    )
    assert fit(tied, shapes([5, 4]), dict.fromkeys(SHAPES, ADAM), strict=True).notes == ()
