"""The planned traffic and memory of attention between the ranks that share samples are those of a run."""

from __future__ import annotations

import copy
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, config, in_ranks, my_rank, of_all_ranks
from hybrid_models import hybrid
from tensor_models import build
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unishard
from unishard.engine.model import activation_checkpointing
from unishard.parallel.groups import make_groups
from unishard.sequence.group import make_group
from unishard.sequence.tiles import measured
from unishard.tools.plan.model import PlannedModel

transformers = pytest.importorskip("transformers", reason="pip install 'unishard[hf]'")

LENGTH, ROWS, WINDOW = 16, 2, 2
_OF_HEADS = 4
"""Dimensions of `[batch, heads, positions, dim]`, at the least."""


def llama(key_heads):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    return transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=key_heads)


def recorded(engine, batches, groups):
    """Bytes and calls of collectives by kind and phase, in the last update.

    Args:
        engine: Makes them.
        batches: Of its updates.
        groups: Whose they are, and how many dimensions tensors have at the least.
    """
    found, phase = Counter(), ["forward"]

    def counted(kind, name, whole):
        own = getattr(dist, name)

        def collective(*args, group=None, **options):
            if phase[0] != "step" and group in groups:
                tensors = tree_leaves(args[whole])
                if tensors[0].dim() >= groups[group]:
                    found[kind, phase[0], "bytes"] += sum(each.nbytes for each in tensors)
                    found[kind, phase[0], "calls"] += 1
            return own(*args, group=group, **options)

        return mock.patch.object(dist, name, collective)

    with (
        counted("all_to_all", "all_to_all_single", 1),
        counted("all_gather", "all_gather", 0),
        counted("all_gather", "all_gather_into_tensor", 0),
        counted("all_reduce", "all_reduce", 0),
    ):
        for index, batch in enumerate(batches):
            if index == len(batches) - WINDOW:
                found.clear()
            phase[0] = "forward"
            loss = engine(**batch).loss
            phase[0] = "backward"
            engine.backward(loss)
            phase[0] = "step"
            engine.step()
    return dict(found)


def planned_for(folder, shape, cfg):
    """The same of the plan, whose model is run without data."""
    shape.save_pretrained(folder)
    part, word = LENGTH // cfg.parallel.sequence.size, cfg.activation_checkpointing
    found = Counter()
    for each in PlannedModel(folder, cfg).activations(ROWS, part, word).exchanged_in(WINDOW):
        found[each.kind, each.phase, "bytes"] += each.nbytes
        found[each.kind, each.phase, "calls"] += each.calls
    return dict(found)


def recorded_and_planned(model, cfg, folder):
    """Those of a run on each rank, and the planned ones: a plan takes as long as the run."""
    shape = copy.deepcopy(model.config)
    samples = [{"input_ids": [*range(1, 1 + LENGTH)], "labels": [*range(1, 1 + LENGTH)]} for _ in range(64)]
    loader = unishard.dataloader(samples, cfg, collate_fn=transformers.DefaultDataCollator())
    with unishard.prepare(model, cfg) as engine:
        batches = [*engine.batches(loader)][: 4 * WINDOW]  # in the others, `MixedPositions` looks
        found = of_all_ranks(recorded(engine, batches, groups_of(cfg.parallel)))
    return found, planned_for(folder, shape, cfg) if my_rank() == 0 else None


def groups_of(parallel):
    """Those of this rank that have something together; beside heads, those with samples agree on small tensors."""
    tensor, sequence, expert = parallel.tensor.size, parallel.sequence.size, parallel.expert.size
    found = {make_groups(size).peers: 0 for size in (tensor, expert) if size > 1}
    return found | ({make_group(sequence, tensor).process_group: _OF_HEADS} if sequence > 1 else {})


def configured(backend, parallel, recomputation, precision="fp32"):
    training = {"micro_batch_size": ROWS, "gradient_accumulation_steps": WINDOW}
    sections = {"parallel": parallel, "activation_checkpointing": recomputation, "precision": precision}
    return config(backend, "full_shard", training=training, **sections)


CELLS = (
    (BACKENDS[0], "auto", 2, "none"),
    (BACKENDS[1], "ulysses", 1, "full"),
    (BACKENDS[0], "allgather", 2, "selective"),
    (BACKENDS[1], "allgather", 1, "none"),
)


@in_ranks(cells=CELLS)
def test_planned_traffic_of_attention_is_that_of_a_run(backend, method, key_heads, recomputation, root):
    cfg = configured(backend, {"sequence": {"size": 2, "method": method}}, recomputation)
    model = transformers.LlamaForCausalLM(llama(key_heads))
    found, planned = recorded_and_planned(model, cfg, root)
    assert planned is None or found == [planned] * 2


@in_ranks(cells=((BACKENDS[0], "none", "states"), (BACKENDS[1], "full", "heads")))
def test_planned_traffic_of_a_hybrid_model_is_that_of_a_run(backend, recomputation, recurrences, root):
    cfg = configured(backend, {"sequence": {"size": 2, "recurrences": recurrences}}, recomputation)
    found, planned = recorded_and_planned(hybrid("Bamba"), cfg, root)
    assert planned is None or found == [planned] * 2


@in_ranks(
    world=4,
    cells=(
        (BACKENDS[0], "llama", "tensor=2", "none"),
        (BACKENDS[1], "tied", "tensor=4", "full"),
        (BACKENDS[0], "one key head", "tensor=2 sequence=2", "selective"),
        (BACKENDS[1], "apertus", "tensor=2", "none"),
    ),
)
def test_planned_traffic_of_layers_over_ranks_is_that_of_a_run(backend, name, parallel, recomputation, root):
    """To the byte, and by number of calls."""
    cfg = configured(backend, {key: int(size) for key, size in re.findall(r"(\w+)=(\d)", parallel)}, recomputation)
    found, planned = recorded_and_planned(build(name), cfg, root)
    assert planned is None or found == [planned] * 4


@in_ranks(world=4, cells=((BACKENDS[0], 2, "full", "fp32"), (BACKENDS[1], 4, "none", "bf16")))
def test_planned_traffic_of_experts_is_that_of_a_run(backend, size, recomputation, precision, root):
    """Of all ranks together: each sends all its tokens, which of them stay is not known before."""
    cfg = configured(backend, {"expert": size}, recomputation, precision)
    found, planned = recorded_and_planned(build("mixtral"), cfg, root)
    if planned is not None:
        assert sum(map(Counter, found), Counter()) == Counter({key: 4 * size for key, size in planned.items()})


@in_ranks(world=4, cells=((BACKENDS[0],), (BACKENDS[1],)), in_turn=True)
def test_planned_traffic_of_layers_and_experts_is_that_of_a_run(backend, root):
    """Of all ranks together: those with the same tokens send a part each."""
    cfg = configured(backend, {"tensor": 2, "expert": 4}, "none")
    found, planned = recorded_and_planned(build("qwen3moe"), cfg, root)
    if planned is not None:
        assert sum(map(Counter, found), Counter()) == Counter({key: 4 * size for key, size in planned.items()})


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


def test_planned_activations_of_experts_are_those_of_a_run(tmp_path):
    """In fp32, in which torch multiplies groups only where tensors have data."""
    model, ids = build("mixtral"), torch.arange(ROWS * LONG).view(ROWS, LONG) % 32
    model.save_pretrained(tmp_path)
    cfg = unishard.Config(activation_checkpointing="selective")
    activation_checkpointing.apply(activation_checkpointing.find(model, "selective", cfg.sharding), selective=True)
    with Alive() as alive:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    planned = PlannedModel(str(tmp_path), cfg).activations(ROWS, LONG, "selective")
    assert alive.most == pytest.approx(planned.peak, rel=0.03)


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
