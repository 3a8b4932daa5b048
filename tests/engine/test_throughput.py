"""What counts as a sample and a token, and which peak a device has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unishard.observe import recorder
from unishard.observe.throughput import Work, flops_per_token, peak_flops, work_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("args", "kwargs", "work"),
    [
        ((), {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8)}, Work(2, 16, 8)),
        ((torch.zeros(2, 8, dtype=torch.int32),), {}, Work(2, 16, 8)),
        ((torch.zeros(3, 8),), {}, Work(3, 0, 0)),
        (({"x": [torch.zeros(4, 3, 8, 8)]},), {}, Work(4, 0, 0)),
        ((), {}, Work(0, 0, 0)),
        ((torch.tensor(1.0),), {}, Work(1, 0, 0)),
    ],
    ids=str,
)
def test_what_a_forward_processes(args: tuple[Any, ...], kwargs: dict[str, Any], work: Work) -> None:
    assert work_of(args, kwargs) == work


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, "bf16") == peak
    assert peak_flops(CUDA, "fp32") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_frozen_weights_and_embedding_tables_count_less() -> None:
    """A LoRA-like model: a table that no product uses, a frozen matrix, a trained one."""
    module = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(10, 4), "base": torch.nn.Linear(4, 4, bias=False), "own": torch.nn.Linear(4, 2)}
    )
    module["base"].requires_grad_(False)
    adapter: Any = SimpleNamespace(module=module, master_shard=lambda parameter: SimpleNamespace(shape=parameter.shape))
    assert flops_per_token(adapter) == (4 * 16 + 6 * 10, 0)
    module["own"].weight = torch.nn.Parameter(torch.zeros(10, 4))
    module["table"].weight = module["own"].weight
    assert flops_per_token(adapter) == (4 * 16 + 6 * (40 + 2), 0), "a tied table counts"
