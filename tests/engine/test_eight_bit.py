"""AdamW with moments of 8 bits, in one process: blocks, and the optimizer of bitsandbytes that it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.eight_bit.codes import BLOCK, dequantized, quantized
from unishard.eight_bit.moments import MOMENTS, Moments8bit

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def made(held, start=0):
    return Moments8bit(range(start, start + held), torch.device("cpu"))


def trained(held, start, updates, seed, spread):
    """Moments after updates with gradients of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    moments, weights = made(held, start), torch.randn(held, generator=generator)
    sizes = 10 ** (spread * torch.randn(held // 90 + 1, generator=generator)).repeat_interleave(90)[:held]
    for _ in range(updates):
        given = torch.rand(held, generator=generator) > 0.3
        moments.step += 1
        moments.update(weights, torch.randn(held, generator=generator) * sizes * given, OPTIONS)
    return moments


@settings(max_examples=40, deadline=None)
@given(
    held=st.integers(1, 1500),
    start=st.integers(0, 600),
    updates=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_saved_of_moments_and_loaded_into_the_same_blocks_is_the_same_to_the_bit(
    held, start, updates, seed, spread, cut
):
    moments, again = trained(held, start, updates, seed, spread), made(held, start)
    begin, end = sorted(int(part * held) for part in cut)
    for key in MOMENTS:
        saved = moments.read(key, 0, held)
        assert again.write(key, saved) == 0
        assert torch.equal(again.read(key, 0, held).view(torch.int32), saved.view(torch.int32))
        assert torch.equal(moments.read(key, begin, end), saved[begin:end])


def test_bitsandbytes_own_rule_would_change_half_of_the_blocks():
    """Why `quantized` finds the scale in another way."""
    from bitsandbytes.functional import quantize_blockwise

    from unishard.eight_bit.codes import levels

    first = quantized(torch.randn(512 * BLOCK, generator=torch.Generator().manual_seed(0)), signed=True)
    saved = dequantized(first.codes, first.scales, signed=True)
    _, state = quantize_blockwise(saved, code=levels(saved.device, signed=True), blocksize=BLOCK)
    assert (state.absmax != first.scales).float().mean() > 0.4
    assert torch.equal(quantized(saved, signed=True).scales, first.scales)


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_32_bits_become_the_nearest_of_256_levels(signed):
    values = torch.randn(10 * BLOCK + 3, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    found = quantized(values, signed=signed)
    assert found.changed > 0.9 * len(values)
    error = (dequantized(found.codes, found.scales, signed=signed) - values).abs()
    assert (error <= 0.0071 * found.scales.repeat_interleave(BLOCK)[: len(values)]).all()


def test_blocks_of_a_shard_are_those_of_the_whole_parameter_but_where_it_ends_inside_one():
    whole = trained(1500, 0, 3, 1, 1.0)
    for key in MOMENTS:
        saved = whole.read(key, 0, 1500)
        part = made(1000, 300)
        part.write(key, saved[300:1300])
        assert torch.equal(part.read(key, 0, 1000)[212:980], saved[512:1280])


def test_a_shard_that_begins_with_a_block_is_updated_as_by_bitsandbytes():
    from bitsandbytes.optim import AdamW8bit

    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(8193, generator=generator))
    ours, moments = theirs.detach().clone(), made(8193, 2 * BLOCK)
    optimizer = AdamW8bit([theirs], **OPTIONS)
    for _ in range(5):
        theirs.grad = torch.randn(8193, generator=generator)
        optimizer.step()
        moments.step += 1
        moments.update(ours, theirs.grad, OPTIONS)
    assert torch.equal(ours, theirs)
    assert sum(each.nbytes for each in moments.tensors) == 2 * (8193 + 4 * 33)
