"""Preference training with adapters: PEFT's `disable_adapter` freezes them for the reference, and they train on as in
plain torch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness import SPANNING, config, curve, everyones, own_share, play, values
from torch.nn import functional

import unishard
from unishard.testing import oracle
from unishard.testing.features.lora import lora

WORLD = 2
KINDS = (
    "reference first",
    "plain",
    "policy first",
    "after an evaluation",
    "plain",
    "reference with a graph",
    "plain",
    "plain",
)
"""What each micro-batch does: in every order with the others that changes what is frozen or gathered. Two are one
window."""


def likelihood(output, batch):
    """Of each sample, summed over its tokens."""
    scores = output.logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, batch["labels"][:, 1:, None]).squeeze(-1).sum(-1)


def preferred(policy, reference):
    """DPO's loss: the first sample is to be preferred to the second."""
    gain = policy - reference
    return -functional.logsigmoid(0.5 * (gain[0] - gain[1]))


def loss_of(kind, forward, adapters, batch):
    """The loss of one micro-batch, by an engine or by a model."""
    if kind in ("plain", "after an evaluation"):
        return forward(**batch).loss
    if kind == "policy first":
        policy = likelihood(forward(**batch), batch)
    with torch.set_grad_enabled(kind == "reference with a graph"), adapters.disable_adapter():
        reference = likelihood(forward(**batch), batch).detach()
    if kind != "policy first":
        policy = likelihood(forward(**batch), batch)
    return preferred(policy, reference)


def base(compute):
    return lora(torch.bfloat16 if compute == "bf16" else torch.float32)


def settings(backend, strategy, compute):
    return config(
        backend, strategy, precision=compute, training={"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    )


def adapted(backend, strategy, compute):
    with unishard.prepare(base(compute), settings(backend, strategy, compute)) as engine:
        done = []
        for kind, batch in zip(KINDS, engine.batches(own_share(len(KINDS), "llama")), strict=True):
            if kind == "after an evaluation":
                engine.eval()
                with engine.module.disable_adapter():
                    engine(**batch)
                engine.train()
            loss = loss_of(kind, engine, engine.module, batch)
            engine.backward(loss)
            done.append((engine.mean(loss), engine.step()))
        return curve(done), all(
            parameter.requires_grad for name, parameter in engine.module.named_parameters() if "lora_" in name
        )


@cache
def expected(compute):
    """Plain torch, with the same kinds in turn."""
    turns = [everyones(turn, turn + 1, world=WORLD, model="llama") for turn in range(len(KINDS))]
    kinds = iter([kind for kind in KINDS for _ in range(WORLD)])
    summed = oracle.Summed(lambda model, batch: loss_of(next(kinds), model, model, batch), lambda batch: 1)
    windows = [first + second for first, second in zip(turns[::2], turns[1::2], strict=True)]
    return oracle.train(base(compute), windows, settings("fsdp", "no_shard", compute), world=WORLD, summed=summed)


CELLS = tuple((adapted, cell) for cell in SPANNING)


@pytest.mark.parametrize("cell", [cell for _, cell in CELLS], ids="-".join)
def test_a_reference_with_adapters_disabled_changes_nothing(cell):
    for found, trains in values(play(CELLS)[adapted, cell]):
        wanted = expected(cell[2])
        assert found.losses == pytest.approx(wanted.losses, rel=1e-6 if cell[2] == "fp32" else 1e-5)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-5 if cell[2] == "fp32" else 1e-3)
        assert trains
