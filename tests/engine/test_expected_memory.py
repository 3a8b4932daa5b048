"""The note of an out-of-memory error counts as activations what is neither state nor was there before."""

from __future__ import annotations

import pytest
import torch

from unishard.contract.footprint import Bytes, Footprint
from unishard.contract.plan import MemorySpec
from unishard.observe.expected_memory import ExpectedMemory

GIB = 2**30
NONE = Bytes(0)
FOOTPRINT = Footprint(
    parameters=Bytes(2 * GIB), masters=NONE, optimizer=Bytes(4 * GIB), gradients=NONE, kept_gradients=NONE, buffers=NONE
)


@pytest.mark.parametrize(("updated", "reached", "said"), [(False, 3, "1.00 GiB"), (True, 7, "1.00 GiB"), (True, 3, "")])
def test_before_the_first_update_there_is_no_optimizer_state(monkeypatch, updated, reached, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: reached * GIB)
    memory = ExpectedMemory(MemorySpec(lambda *_: FOOTPRINT, {"training.micro_batch_size=1": 0.5}, ()))
    if updated:
        memory.on_step(None)
    error = torch.OutOfMemoryError("CUDA out of memory")
    memory.on_error(error)
    lines = "".join(error.__notes__).splitlines()
    assert [line.split("take, ")[1] for line in lines if "activations" in line] == ([f"{said} so far"] if said else [])
    assert any("micro_batch_size=1" in line and ("saves about 0.50 GiB" in line) is bool(said) for line in lines)
