"""The loss in chunks: training is that of plain torch in one process, and the head is gathered as often as without."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from harness import BACKENDS, caught, in_ranks, my_rank, refused
from harness.training import DEEP, EACH, EVERY, SPANNING
from sequence_models import VOCABULARY, batch_of, build, data_for
from test_sequence import assert_equal, compared, configured, expected, trained
from torch import nn
from torch.nn import functional

import unishard
from dev.ranks.recording import Recorder

CHUNK = 5
SHARDED = tuple((backend, kind) for backend in BACKENDS for kind in ("plain", "tied", "adapted", "copied"))
"""Kinds of heads: tied to the embedding, with LoRA, and trained beside its original (`modules_to_save`)."""


def chunked(backend: str, strategy: Any = "full_shard", size: int = 1, **sections: Any) -> Any:
    return configured(backend, strategy, size=size, **sections).override(f"training.loss_chunk_tokens={CHUNK}")


def with_head(kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build("llama")
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    torch.manual_seed(1)
    if kind == "adapted":
        targets = ["q_proj", "lm_head"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if kind == "copied":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    return model


@in_ranks(cells=EVERY if DEEP else SPANNING)
def test_training_is_that_of_one_process(backend, strategy, precision):
    compared(chunked(backend, strategy, precision=precision), "llama", readers=2)


@in_ranks(cells=tuple((BACKENDS[number % 2], name) for number, name in enumerate(("softcap", "sinks", "chunks"))))
def test_each_kind_of_model(backend, name):
    compared(chunked(backend, "no_shard"), name, readers=2)


@in_ranks(cells=tuple((backend, name) for backend in BACKENDS for name in ("llama", "balanced experts")), in_turn=True)
def test_beside_split_sequences(backend, name):
    """Their proof at the first forward needs logits, and gets them."""
    compared(chunked(backend, size=2), name, readers=1)


FEATURES = {
    "recomputed": {"activation_checkpointing": "full"},
    "recomputed selectively": {"activation_checkpointing": "selective"},
    "compiled": {"compile": {"mode": "per_block", "backend": "eager"}},
    "offloaded": {"offload": "cpu"},
}


@in_ranks(cells=tuple((backend, feature) for backend in BACKENDS for feature in FEATURES), in_turn=True)
def test_beside_what_else_a_config_asks_for(backend, feature):
    compared(chunked(backend, **FEATURES[feature]), "llama", readers=2)


@in_ranks(world=4, cells=EACH, in_turn=True)
def test_hybrid_groups(backend):
    compared(chunked(backend, {"strategy": "hybrid_shard", "group_size": 2}), "llama", readers=4)


@in_ranks(cells=tuple((backend, compute) for backend in BACKENDS for compute in ("bf16", "fp16")), in_turn=True)
def test_the_loss_of_a_head_in_fp32_is_not_rounded(backend, compute):
    cfg, batch = (
        chunked(backend, precision={"compute": compute, "keep_fp32": ["lm_head"]}),
        batch_of(data_for("llama"), 0),
    )
    losses = []
    for each in (cfg, cfg.override("training.loss_chunk_tokens=null")):
        with unishard.prepare(build("llama"), each) as engine:
            loss = engine(**batch).loss
            engine.discard()
        losses.append(loss)
    assert losses[0].dtype == torch.float32
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4)


@in_ranks(cells=SHARDED, in_turn=True)
def test_kinds_of_heads(backend, kind):
    cfg = chunked(backend)
    with unishard.prepare(with_head(kind), cfg) as engine:
        curve = trained(engine, cfg, "llama")
    assert_equal(curve, expected(cfg, "llama", 2, model=with_head(kind))[0])


def gathered(cfg: Any, kind: str) -> Counter[tuple[str, int]]:
    """The collectives of the third micro-batch, by their elements."""
    recorder, batch = Recorder(), batch_of(data_for("llama"), 2 * my_rank())
    with unishard.prepare(with_head(kind), cfg) as engine:
        for turn in range(3):
            recorder.events.clear()
            with recorder:
                engine.backward(engine(**batch).loss)
            engine.step()
            if turn == 1:
                assert recorder.events
        engine.discard()
    return Counter((event.kind, event.numel) for event in recorder.events)


@in_ranks(cells=SHARDED, in_turn=True)
def test_the_head_is_gathered_once_a_micro_batch(backend, kind):
    """10 chunks cost the collectives of a loss over all tokens."""
    cfg = chunked(backend)
    in_chunks, plain = gathered(cfg, kind), gathered(cfg.override("training.loss_chunk_tokens=null"), kind)
    assert in_chunks == plain
    assert any(event == "all_gather" for event, _ in plain)


@in_ranks(cells=EACH, in_turn=True)
def test_what_needs_logits_says_that_they_were_not_made(backend):
    cfg, batch = chunked(backend), batch_of(data_for("llama"), 0)
    plain = build("llama").eval()
    with unishard.prepare(build("llama"), cfg) as engine:
        output = engine(**batch)
        message = refused(lambda: output.logits.argmax(-1))
        shape, shown = output.logits.shape, repr(output)
        engine.discard()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            engine.discard()
        engine.eval()
        loss = engine(**batch).loss
        whole = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        tokens = engine.generate(batch["input_ids"][:1, :6], max_new_tokens=3, do_sample=False)
        metrics = refused(engine.gather_for_metrics, engine(**batch).logits)
    assert "training.loss_chunk_tokens" in message
    assert "engine(input_ids=...).logits" in message
    assert shape == (2, 23, VOCABULARY)
    assert "not made" in shown
    assert logits.requires_grad
    assert sum("without labels" in str(each.message) for each in said) == 1
    assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    own = plain(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(whole, own, rtol=0, atol=1e-5)
    assert torch.equal(tokens, plain.generate(batch["input_ids"][:1, :6], max_new_tokens=3, do_sample=False))
    assert "not made" in metrics


class OwnModel(nn.Module):
    """Hidden states, a head of two modules with weights, and its loss."""

    def __init__(self, chunk_tokens: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, VOCABULARY))
        self.chunk_tokens = chunk_tokens

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        if self.chunk_tokens is None:
            return smoothed(self.head(hidden).flatten(0, 1), labels.flatten())
        return unishard.chunked_loss(self.head, hidden, labels, smoothed, chunk_tokens=self.chunk_tokens)


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Label smoothing and a z-loss, summed."""
    entropy = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    return entropy + 1e-2 * logits.logsumexp(-1).square()[labels != -100].sum()


@in_ranks(cells=EACH, in_turn=True)
def test_an_own_model_and_an_own_loss(backend):
    cfg = configured(backend, "full_shard", size=1).override("training.gradient_accumulation_steps=1")

    def build_own(chunk_tokens: int | None) -> nn.Module:
        torch.manual_seed(0)
        return OwnModel(chunk_tokens)

    plain, everyone = build_own(None), batch_of(data_for("llama"), 0, 4)
    labels = functional.pad(everyone["labels"][:, 1:], (0, 1), value=-100)
    (plain(everyone["input_ids"], labels) / (labels != -100).sum()).backward()
    rows, counts = slice(2 * my_rank(), 2 * my_rank() + 2), {}
    for chunk_tokens in (None, 7):
        recorder = Recorder()
        with unishard.prepare(build_own(chunk_tokens), cfg) as engine:
            for _ in range(2):
                recorder.events.clear()
                with recorder:
                    loss = engine(everyone["input_ids"][rows], labels[rows])
                    engine.backward(loss, num_items=(labels[rows] != -100).sum())
                own = {name: engine.gradients.read(name) for name, _ in plain.named_parameters()}
                engine.discard()
        counts[chunk_tokens] = Counter(event.kind for event in recorder.events)
        refusal = refused(unishard.prepare, build_own(7), cfg.override("training.loss_chunk_tokens=5"))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad, rtol=0, atol=1e-6)
    assert counts[7] == counts[None]
    assert "call unishard.chunked_loss" in refusal


@in_ranks(cells=EACH, in_turn=True)
def test_the_model_is_as_before_after_it(backend):
    model, batch = build("llama"), batch_of(data_for("llama"), 0)
    before = model(**batch).loss.item()
    with unishard.prepare(model, chunked(backend)) as engine:
        error = caught(RuntimeError, lambda: engine(**batch | {"labels": batch["labels"].float()}))
        engine.discard()
        inside = [*vars(model)]
        engine.framework.release()
    output = model(**batch)
    assert "lm_head" not in inside, error
    assert output.loss.item() == before
    assert output.logits.argmax(-1).shape == (2, 23)
