"""The planned traffic and memory of attention between the ranks that share samples are those of a run."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, config, in_ranks, my_rank, of_all_ranks
from hybrid_models import hybrid
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unishard
from unishard.sequence.tiles import measured
from unishard.tools.plan.exchange import exchanged_in, traced_in
from unishard.tools.plan.model import PlannedModel

transformers = pytest.importorskip("transformers", reason="pip install 'unishard[hf]'")

LENGTH, ROWS, WINDOW = 16, 2, 2
_OF_HEADS = 4
"""Dimensions of `[batch, heads, positions, dim]`; an all-to-all has one more, for the ranks."""


def llama(key_heads):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    return transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=key_heads)


def recorded(engine, batches):
    """Bytes of collectives of heads, by kind and phase, in the second update."""
    found, phase = Counter(), ["forward"]
    all_to_all, all_gather = dist.all_to_all_single, dist.all_gather

    def exchange(received, sent, **options):
        if sent.dim() == 1 + _OF_HEADS:
            found["all_to_all", phase[0]] += sent.nbytes
        return all_to_all(received, sent, **options)

    def gather(everyones, tensor, **options):
        if tensor.dim() == _OF_HEADS:
            found["all_gather", phase[0]] += tensor.nbytes * len(everyones)
        return all_gather(everyones, tensor, **options)

    with mock.patch.object(dist, "all_to_all_single", exchange), mock.patch.object(dist, "all_gather", gather):
        for index, batch in enumerate(batches):
            if index == WINDOW:
                found.clear()
            phase[0] = "forward"
            loss = engine(**batch).loss
            phase[0] = "backward"
            engine.backward(loss)
            engine.step()
    return dict(found)


CELLS = (
    (BACKENDS[0], "auto", 2, "none"),
    (BACKENDS[1], "ulysses", 1, "full"),
    (BACKENDS[0], "allgather", 2, "selective"),
    (BACKENDS[1], "allgather", 1, "none"),
)


@in_ranks(cells=CELLS)
def test_planned_traffic_of_attention_is_that_of_a_run(backend, method, key_heads, recomputation, root):
    training = {"micro_batch_size": ROWS, "gradient_accumulation_steps": WINDOW}
    sections = {"parallel": {"sequence": {"size": 2, "method": method}}, "activation_checkpointing": recomputation}
    cfg = config(backend, "full_shard", training=training, **sections)
    folder = f"{root}/{my_rank()}"
    llama(key_heads).save_pretrained(folder)
    sizes = PlannedModel(folder, cfg).attention
    planned = {(each.kind, each.phase): each.nbytes for each in exchanged_in(sizes, cfg, LENGTH // 2)}
    samples = [{"input_ids": [*range(1, 1 + LENGTH)], "labels": [*range(1, 1 + LENGTH)]} for _ in range(8)]
    loader = unishard.dataloader(samples, cfg, collate_fn=transformers.DefaultDataCollator())
    with unishard.prepare(transformers.LlamaForCausalLM(llama(key_heads)), cfg) as engine:
        found = recorded(engine, engine.batches(loader))
    assert found == planned


@in_ranks(cells=((BACKENDS[0], "none", "states"), (BACKENDS[1], "full", "heads")))
def test_planned_traffic_of_a_hybrid_model_is_that_of_a_run(backend, recomputation, recurrences, root):
    training = {"micro_batch_size": ROWS, "gradient_accumulation_steps": WINDOW}
    sections = {"parallel": {"sequence": {"size": 2, "recurrences": recurrences}}}
    cfg = config(backend, "full_shard", training=training, activation_checkpointing=recomputation, **sections)
    model = hybrid("Bamba")
    shape = copy.deepcopy(model.config)
    samples = [{"input_ids": [*range(1, 1 + LENGTH)], "labels": [*range(1, 1 + LENGTH)]} for _ in range(8)]
    loader = unishard.dataloader(samples, cfg, collate_fn=transformers.DefaultDataCollator())
    with unishard.prepare(model, cfg) as engine:
        found = of_all_ranks(recorded(engine, engine.batches(loader)))
    if my_rank() == 0:  # a plan takes as long as the run
        shape.save_pretrained(root)
        planned = PlannedModel(root, cfg)
        traced = traced_in(planned.activations(ROWS, LENGTH // 2, recomputation), cfg)
        assert planned.attention is None
        assert found == [{(each.kind, each.phase): each.nbytes for each in traced}] * 2


def test_sizes_of_attention_are_those_that_a_config_has(tmp_path):
    llama(2).save_pretrained(tmp_path / "llama")
    compressed = transformers.DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=1)
    compressed.save_pretrained(tmp_path / "compressed")
    cfg = unishard.Config()
    assert tuple(PlannedModel(str(tmp_path / "llama"), cfg).attention) == (2, 4, 2, 4)
    assert PlannedModel(str(tmp_path / "compressed"), cfg).attention is None


class Alive(TorchDispatchMode):
    """The most bytes of tensors that operations have made and something still holds."""

    def __init__(self):
        super().__init__()
        self.most = self._now = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and type(tensor) is not DTensor:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._now += nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key, nbytes):
        self._seen.discard(key)
        self._now -= nbytes


LONG = 3072
MEMORY = tuple(
    (backend, method, recomputation)
    for number, recomputation in enumerate(("none", "full"))
    for method, first in zip(("ulysses", "allgather"), range(number, number + 2), strict=True)
    for backend in (BACKENDS if DEEP else BACKENDS[first % 2 :][:1])
)


def most_alive(engine, cfg, length):
    """The most bytes of tensors in a micro-batch."""
    ids = [*range(1, 31)] * length
    samples = [{"input_ids": ids[:length], "labels": ids[:length]} for _ in range(2 * ROWS)]
    loader = unishard.dataloader(samples, cfg, collate_fn=transformers.DefaultDataCollator())
    for index, batch in enumerate(engine.batches(loader)):
        alive = Alive()
        with alive if index else nullcontext():  # the first proves that the model can be split
            engine.backward(engine(**batch).loss)
        engine.step()
    return alive.most


def assert_planned(found, shape, folder, cfg, length, rel):
    """That what each rank found is what the first one plans for a model."""
    if my_rank() == 0:  # a plan takes as long as the run
        shape.save_pretrained(folder)
        planned = PlannedModel(folder, cfg).activations(ROWS, length // 2, cfg.activation_checkpointing).peak
        assert found == pytest.approx([planned] * 2, rel=rel)


@in_ranks(cells=MEMORY)
def test_planned_activations_are_those_of_a_run(backend, method, recomputation, root):
    sections = {"parallel": {"sequence": {"size": 2, "method": method}}, "activation_checkpointing": recomputation}
    cfg = config(backend, "full_shard", training={"micro_batch_size": ROWS}, **sections)
    with unishard.prepare(transformers.LlamaForCausalLM(llama(2)), cfg) as engine, measured():
        found = of_all_ranks(most_alive(engine, cfg, LONG))
    assert_planned(found, llama(2), root, cfg, LONG, rel=0.05)


HYBRID = (("Bamba", BACKENDS[1], "heads", "none"), ("Qwen3_5", BACKENDS[0], "states", "full"))


@in_ranks(cells=HYBRID)
def test_planned_activations_of_a_hybrid_model_are_those_of_a_run(name, backend, recurrences, recomputation, root):
    sections = {"parallel": {"sequence": {"size": 2, "recurrences": recurrences}}}
    training = {"micro_batch_size": ROWS}
    cfg = config(backend, "full_shard", training=training, activation_checkpointing=recomputation, **sections)
    model, length = hybrid(name), 512
    shape = copy.deepcopy(model.config)
    with unishard.prepare(model, cfg) as engine, measured():
        found = of_all_ranks(most_alive(engine, cfg, length))
    assert_planned(found, shape, root, cfg, length, rel=0.1)
