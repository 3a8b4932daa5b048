"""Real checkpoints of DeepSpeed, FSDP2 scripts and Accelerate become unishard's, and unishard's become theirs, bit by
bit."""

from __future__ import annotations

import pytest
import torch
from scripts_of_others import MOMENTS, MORE, STEPS, Model, load_fsdp, load_universal, save_deepspeed, save_fsdp

from unishard.checkpoint import manifest
from unishard.checkpoint.convert import convert
from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing import run_ranks

CELLS = [(stage, precision, 2) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")] + [
    (1, "bf16+fp32", 2),
    (3, "fp32", 1),
]
SOURCES = {
    (1, "fp32", 2): (3, "fp32", 2),
    (1, "bf16+fp32", 2): (1, "bf16+fp32", 2),
    (2, "bf16", 2): (2, "bf16", 2),
    (2, "fp32", 2): (2, "fp32", 2),
    (3, "fp32", 1): (3, "fp32", 1),
}
"""What loads a Universal Checkpoint, and what it was made from. At stage 3 one group: several, DeepSpeed 0.19.8 takes
back wrongly."""
LARGE = ["first.weight", "second.weight", "inward.weight"]
SMALL = ["scale", "first.bias", "second.bias", "third.bias"]


def name_of(cell):
    return "-".join(map(str, cell))


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory):
    """What each run held and did afterwards; the folder of the conversions; and what engines did that loaded them."""
    root = tmp_path_factory.mktemp("deepspeed")
    saved = run_ranks(2, save_deepspeed, CELLS, str(root / "theirs"))
    for cell in CELLS:
        convert(root / "theirs" / name_of(cell), root / "ours" / name_of(cell))
    for cell, source in SOURCES.items():
        convert(root / "ours" / name_of(source), root / "universal" / name_of(cell), to="deepspeed-universal")
    loaded = run_ranks(2, load_universal, list(SOURCES), str(root / "universal"))
    return saved, root / "ours", loaded


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory, deepspeed):
    root = tmp_path_factory.mktemp("fsdp")
    saved = run_ranks(2, save_fsdp, str(root))
    for name in ("nested", "flattened", "accelerate"):
        convert(root / name, root / "ours" / name)
    convert(root / "ours" / "nested", root / "dcp" / "fsdp", to="dcp")
    convert(deepspeed[1] / name_of((3, "fp32", 2)), root / "dcp" / "deepspeed", to="dcp")
    folders = [str(root / "dcp" / each) for each in ("fsdp", "deepspeed")]
    return (
        saved,
        root / "ours",
        dict(zip(("fsdp", "deepspeed"), folders, strict=True)),
        run_ranks(2, load_fsdp, folders),
    )


def check_tensors(folder, expected):
    tensors = Tensors(folder)
    for name, value in expected.items():
        assert tensors.shapes[name] == value.shape, name
        assert torch.equal(tensors.full(name), value), name


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
class TestFromDeepSpeed:
    def test_holds_masters_and_moments_bit_by_bit(self, deepspeed, cell):
        saved, ours, _ = deepspeed
        state, _ = saved[0][cell]
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert len(state) == (len(LARGE) + len(SMALL)) * (1 + len(MOMENTS) + (cell[0] == 0))
        check_tensors(ours / name_of(cell), state)

    def test_holds_what_does_not_train(self, deepspeed, cell):
        folder, model = deepspeed[1] / name_of(cell), Model()
        kept = torch.float32 if cell[1] == "fp32" else torch.bfloat16
        check_tensors(folder, {"model.third.weight": model.third.weight.detach().to(kept), "model.shift": model.shift})

    def test_says_the_rest(self, deepspeed, cell):
        folder = deepspeed[1] / name_of(cell)
        facts, tensors = manifest.read(folder), Tensors(folder)
        assert (facts.step, facts.world_size, facts.schedule.updates) == (STEPS, 2, STEPS)
        assert (facts.ties, facts.frozen, facts.buffers) == (
            {"outward.weight": "inward.weight"},
            ["third.weight"],
            ["shift"],
        )
        # At stage 0 in bf16, DeepSpeed 0.19.8 makes an update while it is built (runtime/fp16/unfused_optimizer.py).
        updates = STEPS + (cell[:2] == (0, "bf16"))
        assert all(tensors.full(f"optim.state.{name}.step") == updates for name in (*LARGE, *SMALL))
        assert facts.optimizer.class_name == "AdamW"
        groups = facts.optimizer.groups
        if cell[2] == 2:
            assert [group.names for group in groups] == [LARGE, SMALL]
            assert [(group.options["lr"], group.options["weight_decay"]) for group in groups] == [
                (1e-2, 0.1),
                (2e-2, 0.0),
            ]
        else:
            assert sorted(groups[0].names) == sorted(LARGE + SMALL)


@pytest.mark.parametrize("cell", SOURCES, ids=name_of)
def test_an_engine_goes_on_from_a_universal_checkpoint(deepspeed, cell):
    saved, _, loaded = deepspeed
    for rank in range(2):
        steps, losses = loaded[rank][cell]
        assert steps == STEPS
        assert len(losses) == MORE
        expected = saved[rank][SOURCES[cell]][1]
        assert losses == (expected if SOURCES[cell] == cell else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("name", ["nested", "flattened", "accelerate"])
def test_holds_what_an_fsdp_script_saved(fsdp, name):
    saved, ours, _, _ = fsdp
    state, groups, _ = saved[0]
    check_tensors(ours / name, state)
    facts = manifest.read(ours / name)
    assert facts.step == STEPS
    assert facts.optimizer.class_name == "AdamW"
    held = {tuple(sorted(group.names)): group.options for group in facts.optimizer.groups}
    assert {tuple(sorted(group["params"])) for group in groups} == set(held)
    for group in groups:
        options = held[tuple(sorted(group["params"]))]
        assert {**options, "betas": tuple(options["betas"])} == {
            key: value for key, value in group.items() if key != "params"
        }


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
class TestToPlainTorch:
    def test_a_script_goes_on_as_if_it_had_not_stopped(self, fsdp, flatten):
        saved, _, folders, loaded = fsdp
        for rank in range(2):
            state, groups, losses = loaded[rank][folders["fsdp"], flatten]
            expected, expected_groups, expected_losses = saved[rank]
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert groups == expected_groups
            assert losses == expected_losses

    def test_a_script_goes_on_from_deepspeed(self, fsdp, deepspeed, flatten):
        _, _, folders, loaded = fsdp
        for rank in range(2):
            expected, losses = deepspeed[0][rank][3, "fp32", 2]
            state, groups, found = loaded[rank][folders["deepspeed"], flatten]
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert [group["lr"] for group in groups] == [1e-2, 2e-2]
            assert found == pytest.approx(losses, rel=1e-5)
