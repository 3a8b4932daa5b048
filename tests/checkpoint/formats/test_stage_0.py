"""Stage 0 stores no names: they follow from values or from shapes, and where they do not, nothing is guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unishard.checkpoint import manifest
from unishard.checkpoint.convert import convert
from unishard.checkpoint.tensor_reader import Tensors
from unishard.errors import CheckpointError


def stored(folder, module, optimizer):
    folder.mkdir()
    common = {
        "buffer_names": [],
        "param_shapes": None,
        "shared_params": None,
        "global_steps": 1,
        "skipped_steps": 0,
        "dp_world_size": 2,
    }
    torch.save(
        {"module": module, "optimizer": optimizer, "ds_version": "0.19.8", **common},
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def trained(groups, sizes=((3, 4), (3, 2))):
    model = nn.Sequential(*(nn.Linear(inner, outer) for outer, inner in sizes))
    optimizer = torch.optim.AdamW(groups(model))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return model, optimizer


def moments(model, optimizer):
    return {
        f"optim.state.{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        for key in optimizer.state[parameter]
    }


def by_size(model):
    return [{"params": [each for each in model.parameters() if (each.ndim > 1) == large]} for large in (True, False)]


def flat_halves(model, optimizer):
    """As DeepSpeed's fused wrapper keeps it: one flat master of each group, and its state."""
    groups, masters, state = [], [], {}
    for index, group in enumerate(optimizer.param_groups):
        held = [optimizer.state[parameter] for parameter in group["params"]]
        masters.append(torch.cat([parameter.detach().reshape(-1) for parameter in group["params"]]))
        state[index] = {key: torch.cat([each[key].reshape(-1) for each in held]) for key in ("exp_avg", "exp_avg_sq")}
        groups.append({"lr": 0.1, "step": 1, "params": [index]})
        state[index]["step"] = 1
    return {
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "fp32_groups_flat": masters,
        "cur_scale": 1.0,
    }


@pytest.mark.parametrize("groups", [nn.Module.parameters, by_size], ids=["one group", "two groups"])
def test_fp32_by_shapes(tmp_path, groups):
    model, optimizer = trained(groups, ((3, 4), (5, 3)))
    convert(stored(tmp_path / "theirs", model.state_dict(), optimizer.state_dict()), tmp_path / "ours")
    found = Tensors(tmp_path / "ours")
    assert all(torch.equal(found.full(name), value) for name, value in moments(model, optimizer).items())
    assert all(torch.equal(found.full(f"model.{name}"), value) for name, value in model.state_dict().items())


def test_fused_by_values(tmp_path):
    model, optimizer = trained(by_size)
    halves = {name: value.bfloat16() for name, value in model.state_dict().items()}
    convert(stored(tmp_path / "theirs", halves, flat_halves(model, optimizer)), tmp_path / "ours")
    found = Tensors(tmp_path / "ours")
    expected = moments(model, optimizer) | {f"model.{name}": value for name, value in model.state_dict().items()}
    assert all(torch.equal(found.full(name), value) for name, value in expected.items())
    assert [len(group.names) for group in manifest.read(tmp_path / "ours").optimizer.groups] == [2, 2]


def test_does_not_guess_between_groups(tmp_path):
    model, optimizer = trained(
        lambda model: [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    )
    with pytest.raises(CheckpointError, match=r"several have the shape \(3,\)"):
        convert(stored(tmp_path / "theirs", model.state_dict(), optimizer.state_dict()), tmp_path / "ours")


def test_does_not_guess_between_the_frozen_and_the_trained(tmp_path):
    def last(model):
        model[0].requires_grad_(False)
        return model[1].parameters()

    model, optimizer = trained(last, ((3, 3), (3, 3)))
    with pytest.raises(CheckpointError, match=r"several have the shape"):
        convert(stored(tmp_path / "theirs", model.state_dict(), optimizer.state_dict()), tmp_path / "ours")


def test_refuses_masters_of_another_model(tmp_path):
    model, optimizer = trained(by_size)
    halves = {name: (value + 1).bfloat16() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="matches no parameter of the model"):
        convert(stored(tmp_path / "theirs", halves, flat_halves(model, optimizer)), tmp_path / "ours")


def test_refuses_weights_alone(tmp_path):
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        convert(stored(tmp_path / "theirs", nn.Linear(2, 3).state_dict(), None), tmp_path / "ours")
