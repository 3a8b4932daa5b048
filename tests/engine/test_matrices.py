"""Optimizers of matrices in one process: the same as torch's, and which parameters they take as matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unishard
from unishard.config import Config
from unishard.engine.model.shape import shape_of
from unishard.engine.resolve import setup_of
from unishard.errors import ConfigError
from unishard.matrices.owners import Matrix, _balanced, _buckets
from unishard.testing.models import llama, mlp


def twins(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Equal parameters twice."""
    torch.manual_seed(3)
    first = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return first, [nn.Parameter(each.detach().clone()) for each in first]


def step_both(one: Any, other: Any, first: list[nn.Parameter], second: list[nn.Parameter]) -> None:
    for _ in range(4):
        for mine, theirs in zip(first, second, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        one.step()
        other.step()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.02},
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_steps": 3},
        {"lr": 0.02, "nesterov": False, "momentum": 0.8, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
    ids=str,
)
def test_muon_is_torchs_bit_by_bit(options: dict[str, Any]) -> None:
    first, second = twins((6, 4), (4, 9), (8, 8))
    step_both(unishard.Muon(first, **options), torch.optim.Muon(second, **options), first, second)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_the_other_groups_are_torchs_adamw_bit_by_bit() -> None:
    first, second = twins((6, 4), (7,))
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    own = unishard.Muon([{"params": first, "matrices": False, **options}])
    step_both(own, torch.optim.AdamW(second, fused=True, **options), first, second)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_a_parameter_of_three_dimensions_is_several_matrices() -> None:
    (whole,), _ = twins((3, 5, 8))
    parts = [nn.Parameter(each.clone()) for each in whole.detach()]
    stacked, single = unishard.Muon([whole], ns_dtype="fp32"), unishard.Muon(parts, ns_dtype="fp32")
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        for part, gradient in zip(parts, whole.grad, strict=True):
            part.grad = gradient.clone()
        stacked.step()
        single.step()
    torch.testing.assert_close(whole.detach(), torch.stack([part.detach() for part in parts]), rtol=1e-5, atol=1e-6)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs matrices, and a parameter has the shape \(7,\)"):
        unishard.Muon([nn.Parameter(torch.randn(7))])


def test_owners_have_equal_work_and_a_bucket_ends_where_it_is_full() -> None:
    assert sorted(_balanced([5, 4, 3, 3, 3], 2)) == [0, 0, 1, 1, 1]
    matrices = [Matrix(str(rows), torch.Size((rows, 2)), torch.float32) for rows in (3, 4, 9, 1)]
    assert [[each.name for each in bucket] for bucket in _buckets(matrices, 14)] == [["3", "4"], ["9"], ["1"]]


def matrices_in(model: nn.Module) -> set[str]:
    return {each.name for each in shape_of(model, Config().sharding).parameters if each.matrix}


def test_matrices_are_the_weights_of_blocks_without_embeddings_heads_norms_and_biases() -> None:
    assert matrices_in(mlp()) == {f"blocks.{number}.{name}.weight" for number in range(3) for name in ("up", "down")}
    for tied in (False, True):
        found = matrices_in(llama(tie_word_embeddings=tied))
        assert found == {
            name
            for name, parameter in llama(tie_word_embeddings=tied).named_parameters()
            if ".layers." in name and parameter.dim() == 2
        }


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.filter = nn.Embedding(4, 3), nn.Conv1d(3, 3, 2)
        self.experts = nn.Parameter(torch.randn(2, 3, 5))


def test_tables_and_filters_inside_blocks_are_no_matrices_and_fused_experts_are() -> None:
    assert matrices_in(nn.Sequential(Convolving(), Convolving())) == {"0.experts", "1.experts"}


@pytest.mark.parametrize(
    ("build", "fields", "message"),
    [
        (lambda: nn.Linear(3, 3), {}, "auto finds no matrix: .* name them by patterns"),
        (mlp, {"matrices": ["up"]}, r"matches blocks.0.up.bias, whose shape \(37,\) is no matrix"),
        (mlp, {"matrices": ["gate"]}, "'gate' matches no parameter; write part of a name, such as inp.weight"),
    ],
    ids=["no block", "a bias", "nothing"],
)
def test_a_config_whose_matrices_cannot_be_found(build: Callable[[], nn.Module], fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.matrices: {message}"):
        setup_of(Config.model_validate({"optimizer": {"name": "muon", **fields}}), build(), None, None)


def test_torchs_muon_keeps_its_groups_state_and_hooks_on_shards(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hooked: list[object] = []
    optimizer.register_step_post_hook(lambda own, *_: hooked.append(own))
    setup = setup_of(Config.model_validate({"sharding": "full_shard"}), model, optimizer, scheduler)
    stepped = setup(model.named_parameters())
    assert isinstance(stepped, unishard.Muon)
    assert stepped.param_groups[0] is optimizer.param_groups[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    scheduler.step()
    assert stepped.param_groups[0]["lr"] == 0.05
    assert hooked == [stepped]
    assert set(optimizer.state) == set(model.parameters())
    assert not recwarn.list
