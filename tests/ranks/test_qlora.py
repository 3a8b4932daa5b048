"""QLoRA by `from_pretrained`: bytes that every rank reads in parts, stay what they are, and move between engines with
the adapters. Curves on bases that bitsandbytes has quantized itself are held by the conformance suite."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from harness import BACKENDS, config, in_turn, losses_of, on_ranks, own_share
from harness.training import OTHER

import unishard
from unishard.testing.features.quantization import quantized_by_bitsandbytes, with_adapters
from unishard.testing.models import batch, llama

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0}
NF4 = {"type": "nf4", "double_quantization": True}
UPDATES = 4


def adapted(folder, cfg):
    from transformers import AutoModelForCausalLM

    return with_adapters(unishard.from_pretrained(AutoModelForCausalLM, folder, cfg), modules_to_save=["lm_head"])


def own(parameter):
    """This rank's part, before any forward."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.ds_tensor


def bytes_of(engine):
    """All that is quantized, in full."""
    return {name: each for name, each in engine.weights.state_dict(all_ranks=True).items() if each.dtype == torch.uint8}


def first_half(backend, root):
    """Half of the updates under full_shard, and what is saved, exported, streamed and held."""
    cfg = config(backend, optimizer=ADAMW, quantization=NF4, training={"micro_batch_size": 2})
    with unishard.prepare(adapted(f"{root}/base", cfg), cfg) as engine:
        before = bytes_of(engine)
        held = sum(own(each).nbytes for name, each in engine.module.named_parameters() if name in before)
        losses = losses_of(engine, own_share(UPDATES, "llama")[: UPDATES // 2])
        engine.save(f"{root}/checkpoint")
        engine.export(f"{root}/adapters")
        merged = dict(engine.weights.stream(merged=True))
        engine.eval()
        logits = engine(**batch("llama", 0, 2)).logits
        return losses, before, bytes_of(engine), merged, logits, held


def second_half(backend, strategy, root):
    """The other updates, of both ranks' data."""
    cfg = config(backend, strategy, optimizer=ADAMW, quantization=NF4, training={"micro_batch_size": 4})
    with unishard.prepare(adapted(f"{root}/base", cfg), cfg) as engine:
        engine.load(f"{root}/checkpoint")
        data = [batch("llama", 4 * turn, 4) for turn in range(UPDATES // 2, UPDATES)]
        return losses_of(engine, data), bytes_of(engine)


def in_one_process():
    """Losses of plain torch with layers of bitsandbytes."""
    base = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4", double=True)
    model = with_adapters(base, modules_to_save=["lm_head"]).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, weight_decay=0)
    losses = []
    for turn in range(UPDATES):
        loss = model(**batch("llama", 4 * turn, 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@in_turn
def test_a_base_in_few_bits_stays_what_it_is_while_adapters_train_on_both_engines(backend, tmp_path):
    llama(intermediate_size=42).save_pretrained(tmp_path / "base")
    ranks = on_ranks(first_half, backend, str(tmp_path))
    strategy = "full_shard" if backend == BACKENDS[0] else "no_shard"
    ((resumed, loaded),) = on_ranks(second_half, OTHER[backend], strategy, str(tmp_path), world=1)
    losses, before, after, merged, logits, _ = ranks[0]
    assert losses + resumed == pytest.approx(in_one_process(), rel=1e-6)

    assert len(before) == 2 * 14
    assert same(before, after)
    assert same(before, loaded)
    whole = sum(each.nbytes for each in before.values())
    for *_, held in ranks:
        assert abs(held - whole / 2) <= len(before)  # of an odd number of bytes one rank has one more, or padding

    plain = llama(intermediate_size=42).eval()
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(**batch("llama", 0, 2)).logits, logits, rtol=1e-5, atol=1e-5)
    exported_adapters_fit_what_bitsandbytes_has_quantized(tmp_path / "adapters", logits)


def exported_adapters_fit_what_bitsandbytes_has_quantized(folder: Path, logits):
    from peft import PeftModel

    base = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4", double=True)
    with warnings.catch_warnings():
        # peft 0.21.2 asks transformers 5.23 by an old name (peft/peft_model.py).
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(base, folder).train()  # in evaluation bitsandbytes may lay weights out anew
    torch.testing.assert_close(model(**batch("llama", 0, 2)).logits, logits, rtol=1e-5, atol=1e-5)
