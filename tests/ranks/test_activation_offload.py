"""`offload.activations`: the same bits on both engines, with what lies on the host between forward and backward."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from harness import EACH, curve, in_ranks, own_share, refused, train
from harness.training import DEEP, configured
from sequence_models import build
from test_sequence import configured as sequence_config
from test_sequence import trained

import unishard
from unishard.config import Config
from unishard.engine.model.activation_offload import units
from unishard.engine.model.activation_offload.store import ActivationStore, HostCopy
from unishard.errors import ConfigError
from unishard.testing.features.lora import lora
from unishard.testing.models import MODELS

COMPILED = {"compile": {"mode": "per_block", "backend": "aot_eager"}}
RECOMPUTED = {"activation_checkpointing": "full"}
SECTIONS = {
    "none": {},
    "recomputed": RECOMPUTED,
    "compiled": COMPILED,
    "compiled and recomputed": COMPILED | RECOMPUTED,
    "offloaded": {"offload": {"params": "cpu", "optimizer": "cpu"}},
}
KINDS = {"mlp": MODELS["mlp"].build, "llama": MODELS["llama"].build, "lora": lora}
REPEATED = (
    ("fsdp", "full_shard", "fp32", "compiled", "llama"),
    ("fsdp", "shard_grad_op", "fp32", "recomputed", "mlp"),
    ("deepspeed", "full_shard", "fp32", "none", "lora"),
    ("deepspeed", "shard_optimizer", "fp32", "recomputed", "mlp"),
)
"""Of which the other engine has all."""
CELLS = (
    ("fsdp", "full_shard", "fp32", "none", "llama"),
    ("fsdp", "full_shard", "bf16", "recomputed", "llama"),
    ("fsdp", "full_shard", "bf16", "none", "lora"),
    ("fsdp", "full_shard", "bf16", "offloaded", "mlp"),
    ("fsdp", "no_shard", "bf16", "none", "mlp"),
    ("deepspeed", "full_shard", "bf16", "none", "llama"),
    ("deepspeed", "full_shard", "fp32", "recomputed", "llama"),
    ("deepspeed", "full_shard", "fp32", "compiled and recomputed", "llama"),
    ("deepspeed", "shard_grad_op", "bf16", "none", "mlp"),
    *(REPEATED if DEEP else ()),
)


class Watch:
    """What is copied in a block, however small it is."""

    def __init__(self):
        self.copies: list[weakref.ref[HostCopy]] = []
        self.storages: list[weakref.ref] = []
        self._patches = [mock.patch.object(units, "SMALL", 0), mock.patch.object(ActivationStore, "take", self._take())]

    def _take(self):
        real = ActivationStore.take

        def take(store, tensor):
            found = real(store, tensor)
            self.copies.append(weakref.ref(found))
            self.storages.append(weakref.ref(tensor.untyped_storage()))
            return found

        return take

    def __enter__(self):
        for patch in self._patches:
            patch.__enter__()
        return self

    def __exit__(self, *error):
        for patch in self._patches:
            patch.__exit__(*error)

    @property
    def on_host(self):
        return len({copy for each in self.copies if (copy := each()) is not None})

    def of(self, module):
        """How many of the tensors that were copied are those of the module now."""
        own = {tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())}
        return len({storage for each in self.storages if (storage := each()) in own})


def ran(cfg: Config, kind: str):
    """The curve and the weights of a training."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with unishard.prepare(KINDS[kind](), cfg) as engine:
        found = curve(train(engine, own_share(4, "mlp" if kind == "mlp" else "llama")))
        return found, engine.weights.state_dict(all_ranks=True)


def with_activations(sections):
    return sections | {"offload": sections.get("offload", {}) | {"activations": "cpu"}}


@in_ranks(cells=CELLS)
def test_losses_and_weights_have_the_bits_of_those_without(backend, strategy, precision, sections, kind):
    given = SECTIONS[sections]
    wanted = ran(configured(backend, strategy, precision, **given), kind)
    with Watch() as watch:
        found = ran(configured(backend, strategy, precision, **with_activations(given)), kind)
    assert watch.copies
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


@in_ranks(world=4, cells=EACH, in_turn=True)
def test_hybrid_groups(backend):
    sharding = {"strategy": "hybrid_shard", "group_size": 2}
    wanted = ran(configured(backend, sharding), "mlp")
    with Watch() as watch:
        found = ran(configured(backend, sharding, **with_activations({})), "mlp")
    assert watch.copies
    assert found[0] == wanted[0]


@in_ranks(cells=tuple((backend, asked) for (backend,) in EACH for asked in ("none", "full")), in_turn=True)
def test_long_sequences(backend, asked):
    found = []
    for offload in ({}, {"activations": "cpu"}):
        cfg = sequence_config(backend, size=2, offload=offload, activation_checkpointing=asked)
        with Watch() as watch, unishard.prepare(build("llama"), cfg) as engine:
            found.append(trained(engine, cfg, "llama", 2))
        assert bool(watch.copies) == bool(offload)
    assert found[0] == found[1]


STAGES = tuple((backend, strategy) for (backend,) in EACH for strategy in ("full_shard", "shard_grad_op"))


@in_ranks(cells=STAGES)
def test_weights_stay_and_the_host_is_empty_after_backward(backend, strategy):
    said = []
    with Watch() as watch:
        cfg = configured(backend, strategy, **with_activations({}))
        with unishard.prepare(MODELS["llama"].build(), cfg) as engine:
            for micro_batch in own_share(2, "llama"):
                loss = engine(**micro_batch).loss
                between = watch.on_host
                engine.backward(loss)
                engine.step()
                del loss
                said.append((between, watch.on_host, watch.of(engine.module)))
            with torch.no_grad():
                engine(**micro_batch)
            said.append(watch.on_host)
    assert said[0] == said[1]
    between, after, weights = said[0]
    assert between >= 10 * len(MODELS["llama"].build().model.layers)
    assert (after, weights, said[2]) == (0, 0, 0)


@in_ranks(cells=(("deepspeed",),))
def test_gathered_weights_are_freed_after_the_forward_of_each_unit(backend):
    """What stands for a weight in the graph does not keep what ZeRO-3 has gathered."""
    cfg = configured(backend, "full_shard", **with_activations({}))
    with unishard.prepare(MODELS["llama"].build(), cfg) as engine:
        layer = engine.module.model.layers[0]
        gathered = []
        layer.mlp.register_forward_pre_hook(
            lambda module, args: gathered.append(weakref.ref(module.up_proj.weight.untyped_storage()))
        )
        (micro_batch,) = own_share(1, "llama")
        loss = engine(**micro_batch).loss
        alive = [each() for each in gathered]
        engine.backward(loss)
    assert alive == [None]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"activation_checkpointing": "selective"}, "does not reach what activation_checkpointing selective keeps"),
        ({"compile": "full"}, "compile full makes one graph of the model"),
    ],
)
def test_a_pair_that_would_keep_activations_on_the_device_is_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        configured("fsdp", "full_shard", **with_activations(sections))


@in_ranks(cells=EACH, in_turn=True)
def test_a_model_that_recomputes_by_itself_is_refused(backend):
    model = MODELS["llama"].build()
    model.gradient_checkpointing_enable()
    said = refused(unishard.prepare, model, configured(backend, "full_shard", **with_activations({})))
    assert "offload.activations: model already recomputes (gradient_checkpointing_enable); call" in said
