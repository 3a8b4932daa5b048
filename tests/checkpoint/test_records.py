"""With its envelope around it, a tensor's data is a record as long as that of torch.save, which torch.load reads."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unishard.checkpoint.records import envelope_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
@given(shape=st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_torch_reads_them(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for seed in range(2):  # the second time the envelope is there already
        values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
        before, after = envelope_of(values)
        record = before + values.reshape(-1).view(torch.uint8).numpy().tobytes() + after
        assert torch.equal(torch.load(io.BytesIO(record), weights_only=True), values)
        written = io.BytesIO()
        torch.save(values, written)
        assert len(written.getvalue()) == len(record)


def test_torchs_own_setting_stays() -> None:
    envelope_of(torch.zeros(7, 3, 1))
    assert torch.serialization.get_crc32_options() is True
