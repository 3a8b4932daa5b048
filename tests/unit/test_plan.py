"""The core of `unishard plan`: peaks, traffic, inverse questions and the recommendation, from shapes alone."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.footprint import Collective
from unishard.contract.model_shape import ModelShape, ParameterShape
from unishard.errors import ConfigError, ModelError
from unishard.tools.plan.activations import Activations, Segment
from unishard.tools.plan.candidates import STRATEGIES, candidates_of, wire_of, with_strategy
from unishard.tools.plan.devices import DEVICES, Device, device_named, parse_bytes, with_unit
from unishard.tools.plan.planning import make_plan
from unishard.tools.plan.questions import (
    gpus_needed,
    largest,
    largest_micro_batch,
    largest_seq_len,
    recommend,
    with_compilation,
)

GIB = 2**30
H100 = DEVICES["h100-80g"]


def llama(layers: int = 80, hidden: int = 8192, inner: int = 28672, kv: int = 1024, vocab: int = 128256) -> ModelShape:
    """The shape of Llama-3-70B, or of a smaller one."""
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }

    def parameter(name: str, shape: tuple[int, ...], unit: int) -> ParameterShape:
        return ParameterShape(f"{name}.weight", shape, "bfloat16", True, unit)

    found = [parameter("model.embed_tokens", (vocab, hidden), 0)]
    for layer in range(layers):
        found += [parameter(f"model.layers.{layer}.{name}", shape, layer + 1) for name, shape in block.items()]
    found += [parameter("model.norm", (hidden,), -1), parameter("lm_head", (vocab, hidden), -1)]
    return ModelShape(tuple(found), (), ("model.embed_tokens", *(f"model.layers.{layer}" for layer in range(layers))))


def activations(shape: ModelShape, micro_batch_size: int = 1, seq_len: int = 4096, each: int = 2**20) -> Activations:
    """As many bytes for each block and token."""
    units = list(enumerate(shape.units))
    size = micro_batch_size * seq_len * each // 4096
    forward = [Segment("forward", name, index, *[size * (index + 1)] * 2) for index, name in units]
    backward = [segment._replace(phase="backward") for segment in reversed(forward)]
    return Activations(micro_batch_size, seq_len, "none", (*forward, *backward))


def config(**sections: object) -> Config:
    return Config.model_validate({"precision": "bf16"} | sections)


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_slices_travel_among_the_ranks_that_have_the_same(backend: str, strategy: str) -> None:
    """Those of the layers over 4 of 8 ranks, every second one, the rest over all."""
    shape = llama(layers=2)
    cut = replace(shape, parameters=tuple(replace(each, slices=1 + (each.unit > 0)) for each in shape.parameters))
    cfg, topology = config(sharding=strategy, parallel={"tensor": 2}), Topology(8, 8)
    (found,) = candidates_of(cfg, cut, topology, backends=[backend], strategies=[strategy])
    assert found.footprint is not None
    groups = {(each.ranks, each.stride) for each in found.footprint.traffic}
    assert groups == {(8, 1), (4, 2)}
    whole = [each for each in shape.parameters if each.unit <= 0]
    layers = [each for each in shape.parameters if each.unit > 0]
    for parameters, ranks in ((whole, 8), (layers, 4)):
        alone = replace(shape, parameters=tuple(parameters))
        plain = config(sharding=strategy)
        (expected,) = candidates_of(plain, alone, Topology(ranks, ranks), backends=[backend], strategies=[strategy])
        assert expected.footprint is not None
        sent = [each.sent() for each in found.footprint.traffic if each.ranks == ranks]
        assert sent == [each.sent() for each in expected.footprint.traffic]


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize(("strategy", "sharing"), [("full_shard", 8), ("shard_grad_op", 8), ("no_shard", 2)])
def test_matrices_of_muon_are_whole_where_ranks_have_slices_of_them(backend: str, strategy: str, sharing: int) -> None:
    """Among all ranks that share one, there and back."""
    shape = llama(layers=2)
    layers = [(each, each.unit > 0) for each in shape.parameters]
    cut = replace(shape, parameters=tuple(replace(each, matrix=of, slices=1 + of) for each, of in layers))
    cfg = config(sharding=strategy, parallel={"tensor": 2}, optimizer={"name": "muon", "ns_dtype": "fp32"})
    (found,) = candidates_of(cfg, cut, Topology(8, 8), backends=[backend], strategies=[strategy])
    assert found.footprint is not None
    exchanged = [each for each in found.footprint.traffic if each.kind == "all_to_all"]
    assert [(each.what, each.ranks, each.stride) for each in exchanged] == [
        ("gradients", sharing, 1),
        ("parameters", sharing, 1),
    ]
    whole = 4 * sum(2 * each.numel for each, of in layers if of)
    assert [each.nbytes for each in exchanged] == [whole // sharing] * 2


def test_bytes_on_the_wire_are_those_of_rings() -> None:
    gather = Collective("all_gather", "parameters", "forward", 800, 16)
    assert gather.sent() == 750
    assert gather.between_nodes(8) == 750 // 8
    assert gather.between_nodes(16) == 0
    assert Collective("all_reduce", "gradients", "step", 800, 16).sent() == 1500
    across = Collective("all_reduce", "gradients", "step", 800, 2, 8)  # one rank of each node
    assert (across.sent(), across.between_nodes(8)) == (800, 800)


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("80GiB", "24 GB", "1.5g", "512MiB")] == [
        80 * GIB,
        24 * 10**9,
        3 * GIB // 2,
        512 * 2**20,
    ]
    for text in ("", "much", "0GiB", "80 parsecs"):
        with pytest.raises(ConfigError, match="such as 80GiB"):
            parse_bytes(text)


def test_a_misspelt_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-80g"):
        device_named("h100-80gb")


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 8, 100])
def test_the_largest_that_fits(answer: int) -> None:
    assert largest(lambda count: count <= answer, 100) == answer


def test_every_engine_and_strategy_has_a_line() -> None:
    shape = llama(2, 64, 96, 16, 97)
    found = candidates_of(config(), shape, Topology(16, 8), activations(shape))
    assert [(each.backend, each.strategy) for each in found] == [
        (name, strategy) for name in ("fsdp", "deepspeed") for strategy in STRATEGIES
    ]
    assert [each.refusal for each in found] == [""] * len(found)
    peaks = {(each.backend, each.strategy): each.peak.nbytes for each in found if each.peak}
    for backend in ("fsdp", "deepspeed"):
        assert peaks[backend, "no_shard"] > peaks[backend, "full_shard"]


def test_what_an_engine_refuses_is_said() -> None:
    shape = llama(2, 64, 96, 16, 97)
    found = candidates_of(
        config(precision={"compute": "bf16", "accumulate": "bf16"}), shape, Topology(8, 8), strategies=["full_shard"]
    )
    assert [bool(each.refusal) for each in found] == [True, False]
    assert "the fp32 master weight" in found[0].refusal


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_what_lies_in_files_takes_no_host_memory_but_three_pieces(backend) -> None:
    shape = llama(2, 64, 96, 16, 97)

    def footprint(where):
        offload = {"optimizer": where, "params": where} | ({"nvme_path": "x"} if where == "nvme" else {})
        cfg = config(backend=backend, sharding="full_shard", offload=offload, optimizer={"name": "adamw"})
        return registry.get(backend).footprint(shape, cfg, Topology(8, 8))

    host, files = footprint("cpu"), footprint("nvme")
    for part in ("parameters", "masters", "optimizer"):
        assert getattr(files, part) == getattr(host, part)._replace(host=0, files=getattr(host, part).host)
    assert files.optimizer.files > 0
    assert files.buffers.host - host.buffers.host == 3 * files.optimizer.files
    assert files.gradients == host.gradients


def test_where_only_the_state_is_in_files_no_host_copies_are_kept() -> None:
    def footprint(offload):
        cfg = config(sharding="full_shard", offload=offload, optimizer={"name": "adamw"})
        return registry.get("fsdp").footprint(llama(2, 64, 96, 16, 97), cfg, Topology(8, 8))

    host, files = footprint({"optimizer": "cpu"}), footprint({"optimizer": "nvme", "nvme_path": "x"})
    assert files.optimizer.files == host.optimizer.host > 0
    assert (files.masters.total, files.buffers.host) == (0, 3 * files.optimizer.files)
    assert files.parameters == host.parameters


def test_of_a_state_of_8_bits_the_codes_lie_in_files() -> None:
    shape = llama(2, 512, 1024, 64, 997)

    def state(offload):
        cfg = config(sharding="shard_grad_op", offload=offload, optimizer="adamw_8bit")
        return registry.get("fsdp").footprint(shape, cfg, Topology(1, 1)).optimizer

    found = state({"optimizer": "nvme", "nvme_path": "x"})
    assert found.total == state({"optimizer": "cpu"}).host
    codes = 2 * sum(each.numel for each in shape.trainable if each.numel >= 4096)
    assert found.files == pytest.approx(codes, rel=0.01)


def test_fields_of_another_strategy_are_reset() -> None:
    cfg = config(
        sharding={"strategy": "hybrid_shard", "group_size": 4, "reshard_after_forward": False, "min_unit_params": 5},
        communication={"prefetch_bucket_size": 7},
        offload="cpu",
    )
    for strategy in STRATEGIES:
        assert with_strategy(cfg, "deepspeed", strategy).sharding.strategy == strategy
    assert with_strategy(cfg, "fsdp", "hybrid_shard") is cfg


def test_what_is_reset_takes_along_what_only_it_needs_and_nothing_else() -> None:
    files = config(offload={"params": "nvme", "nvme_path": "x", "activations": "cpu", "pin_memory": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a field that an override leaves unused is a note
        offload = with_strategy(files, "deepspeed", "no_shard").offload
    assert (offload.params, offload.nvme_path) == ("none", None)
    assert (offload.activations, offload.pin_memory) == ("cpu", False)


def test_a_peak_names_its_phase_and_module() -> None:
    shape = llama(4, 64, 96, 16, 97)
    segments = (*activations(shape, each=1).segments, Segment("backward", "model.layers.2", 3, GIB, GIB))
    own = candidates_of(
        config(),
        shape,
        Topology(8, 8),
        Activations(1, 4096, "none", segments),
        backends=["fsdp"],
        strategies=["full_shard"],
    )[0]
    assert own.peak is not None
    assert own.peak.where == "backward of model.layers.2"
    assert own.activations == GIB


def test_activations_of_two_units_stay_on_the_device() -> None:
    shape = llama(layers=10)
    here = activations(shape)
    there = here.offloaded()
    assert here.peak == 11 * 2**20
    assert (there.peak, there.on_host) == (2 * 2**20, 11 * 2**20)
    assert [segment.module for segment in there.segments] == [segment.module for segment in here.segments]
    first, *_, last = there.segments
    assert first.nbytes == last.nbytes == 2**20


def test_questions_are_answered() -> None:
    shape = llama(8, 4096, 11008, 4096, 32000)
    cfg = config()

    def trace(micro_batch_size: int, seq_len: int) -> Activations:
        return activations(shape, micro_batch_size, seq_len, 2**28)

    (own,) = candidates_of(cfg, shape, Topology(8, 8), trace(1, 4096), backends=["fsdp"], strategies=["full_shard"])
    samples = largest_micro_batch(own, shape, 40 * GIB, trace, 4096)
    tokens = largest_seq_len(own, shape, 40 * GIB, trace, 1)
    assert 2 < samples < 100
    assert samples * 4096 <= tokens + 128 < (samples + 1) * 4096 + 256
    ranks = [gpus_needed(cfg, shape, trace(1, 4096), "fsdp", name, 16 * GIB, 8) for name in ("no_shard", "full_shard")]
    assert ranks[0] is None
    assert ranks[1] is not None
    for count, fits in ((ranks[1], True), (ranks[1] // 2, False)):
        (each,) = candidates_of(
            cfg, shape, Topology(count, min(8, count)), trace(1, 4096), backends=["fsdp"], strategies=["full_shard"]
        )
        assert each.fits(16 * GIB) is fits


class Cut:
    """A llama of which experts are no part, and 8 heads."""

    name = "llama"

    def __init__(self, cfg: Config) -> None:
        self.cfg, self.size = cfg, cfg.parallel.tensor.size

    @property
    def shape(self) -> ModelShape:
        if self.cfg.parallel.expert.on or self.size > 8:
            raise ModelError("cannot be cut")
        whole = llama(layers=4)
        cut = (replace(each, shape=(each.shape[0] // self.size, *each.shape[1:])) for each in whole.parameters)
        return replace(whole, parameters=tuple(cut))

    def activations(self, micro_batch_size: int, seq_len: int, recomputation: str | list[str]) -> Activations:
        return activations(self.shape, micro_batch_size, seq_len)

    def configured(self, cfg: Config) -> Cut:
        return Cut(cfg)


@pytest.mark.parametrize(("needed", "found"), [(1, {}), (2, {"tensor": 2}), (4, {"tensor": 4}), (16, {})])
def test_the_smallest_size_of_layers_over_ranks_that_fits(needed: int, found: dict[str, int]) -> None:
    """Where the config fits as it is, none is named, as where the size with which it would is refused."""
    cfg, topology = config(sharding="no_shard"), Topology(32, 16)
    peak = make_plan(cfg, Cut(cfg), topology, None, seq_len=64).own.reserved[0]
    device = Device("", int(peak / needed * 1.1), 1, 1)
    answers = make_plan(cfg, Cut(cfg), topology, device, seq_len=64).answers
    assert answers is not None
    assert answers.parallel == found


def test_the_recommendation_is_the_cheapest_that_fits() -> None:
    shape, topology = llama(8, 4096, 11008, 4096, 32000), Topology(8, 8)
    small, large = activations(shape, each=2**20), activations(shape, each=2**34)
    levels = [
        ("none", candidates_of(config(), shape, topology, large)),
        ("full", candidates_of(config(), shape, topology, small)),
    ]
    asked = next(each for each in levels[0][1] if each.strategy == "full_shard")
    found = recommend(levels, topology, H100, asked)
    assert found.candidate is not None
    assert "activation_checkpointing=full" in found.changes
    times = {
        (each.backend, each.strategy): wire_of(each.footprint, topology, H100).seconds
        for each in levels[1][1]
        if each.footprint and each.fits(H100.memory)
    }
    assert times[found.candidate.backend, found.candidate.strategy] == min(times.values())
    nothing = recommend(levels, topology, H100._replace(memory=GIB), asked)
    assert nothing.changes == ()
    assert "comes nearest" in nothing.reason


def test_what_more_memory_gains_is_said() -> None:
    shape, topology = llama(8, 4096, 11008, 4096, 32000), Topology(8, 8)
    found = candidates_of(config(), shape, topology)
    rows = {(each.backend, each.strategy): each for each in found}
    asked = rows["fsdp", "full_shard"]
    more = recommend([("none", found)], topology, H100, asked, traced=False)
    best = more.candidate
    assert best is not None
    for each in (best, asked):
        assert each.peak is not None
        assert each.footprint is not None
    assert best.peak.nbytes > asked.peak.nbytes
    gained = wire_of(asked.footprint, topology, H100).seconds - wire_of(best.footprint, topology, H100).seconds
    assert gained > 0
    extra = with_unit(best.peak.nbytes - asked.peak.nbytes)
    assert f"{extra} more than full_shard on fsdp, for {gained:.2g} s less on the wire" in more.reason
    assert "without activations, so by an unknown margin" in more.reason
    same = recommend([("none", found)], topology, H100, best)
    assert " more than " not in same.reason
    assert "margin" not in same.reason


def test_blocks_that_are_alike_are_compiled_on_a_gpu_if_nothing_is_yet() -> None:
    shape, topology = llama(8, 4096, 11008, 4096, 32000), Topology(8, 8)
    levels = [("none", candidates_of(config(), shape, topology, activations(shape, each=2**20)))]
    found = recommend(levels, topology, H100, levels[0][1][0])
    compiled = with_compilation(found, config(), shape, H100)
    assert compiled.changes == (*found.changes, "compile=per_block")
    assert "compiles one of 8 blocks that are alike" in compiled.reason
    assert with_compilation(found, config(compile="full"), shape, H100) == found
    assert with_compilation(found, config(), shape, H100._replace(name="80GiB")) == found
    assert with_compilation(found, config(), llama(1, 4096, 11008, 4096, 32000), H100) == found


def test_70b_on_1024_ranks_takes_under_a_second() -> None:
    shape = llama()
    assert 70e9 < shape.numel < 71e9
    alive = activations(shape)
    candidates_of(config(), shape, Topology(8, 8), alive)  # what is imported once
    began = time.process_time()
    found = candidates_of(config(), shape, Topology(1024, 8), alive)
    assert time.process_time() - began < 1
    assert {each.refusal for each in found} == {""}
