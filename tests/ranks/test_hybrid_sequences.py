"""Long sequences on hybrid models: recurrences, state spaces, convolutions and shifts see whole sequences."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, in_ranks, my_rank, refused
from harness.training import EACH
from hybrid_models import HYBRID, Mixing, hybrid, in_float64, own_hybrid, recurrence, samples
from kernels_of_hybrids import kernels_for
from sequence_models import LENGTH, VOCABULARY, batch_of
from test_sequence import UPDATES, assert_equal, configured, trained, trained_plainly
from torch.nn import functional

import unishard
from unishard.config import SequenceParallel
from unishard.sequence import context, halo, states
from unishard.sequence.context import SplitBatch
from unishard.sequence.group import make_group
from unishard.sequence.hybrid_functions import use_split_functions
from unishard.sequence.layout import PositionLayout
from unishard.sequence.split_sequences import SplitSequences
from unishard.testing import oracle

METHODS = ("ulysses", "allgather")


def sequence(method: str = "auto", recurrences: str = "auto", size: int = 2) -> dict[str, Any]:
    return {"parallel": {"sequence": {"size": size, "method": method, "recurrences": recurrences}}}


@cache
def expected(name: str, compute: str = "fp32", readers: int = 1) -> tuple[oracle.Curve, dict[str, torch.Tensor]]:
    return trained_plainly(hybrid(name), compute, name, readers, UPDATES)


def compared(cfg: Any, name: str, readers: int = 1, **changes: Any) -> None:
    """Train packed documents, which transformers' functions join, and compare losses, norms and weights."""
    reference, weights = expected(name, cfg.precision.compute, readers)
    with unishard.prepare(hybrid(name, **changes), cfg) as engine:
        curve = trained(engine, cfg, name)
        own = {key: engine.weights.read(key) for key in weights}
    if cfg.precision.compute == "fp32":
        assert_equal(curve, reference)
        for key, value in weights.items():
            torch.testing.assert_close(own[key], value, rtol=0, atol=2e-6, msg=key)
    else:
        assert_equal(curve, reference, relative=2e-2)


OF_EACH_KIND = ("Qwen3Next", "KimiLinear", "Mamba", "Mamba2", "FalconH1", "Zamba2", "Lfm2")
"""Families that call each function, and in each way; all of them are deep tests."""
FAMILIES = tuple(
    (
        BACKENDS[number % 2],
        ("full_shard", "shard_grad_op")[number // 2 % 2],
        name,
        METHODS[number // 2 % 2],
        recurrences,
    )
    for recurrences in ("heads", "states")
    for number, name in enumerate(HYBRID if DEEP else OF_EACH_KIND)
    if recurrences == "heads" or name in ("Qwen3Next", "KimiLinear", "Mamba2", "FalconH1") or DEEP
)


@in_ranks(cells=FAMILIES)
def test_families_of_transformers(backend, strategy, name, method, recurrences):
    compared(configured(backend, strategy, **sequence(method, recurrences)), name)


@in_ranks(
    cells=(
        ("Qwen3Next", "ulysses", "heads"),
        ("KimiLinear", "allgather", "states"),
        ("Bamba", "allgather", "heads"),
        ("Mamba2", "ulysses", "states"),
    )
)
def test_in_float64_gradients_are_equal(name, method, recurrences):
    """So what differs in fp32 was only rounded, which some families make more of than the bounds above."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    whole, split = (hybrid(name, experts_implementation="eager").double() for _ in range(2))
    batch = batch_of(samples(packed=True), 0)
    sequences = SplitSequences(split, SequenceParallel(size=2, method=method, recurrences=recurrences))
    with in_float64():
        expected = whole(**batch).loss
        loss = split(**sequences.place(batch, torch.device("cpu"))).loss
        torch.autograd.backward([expected, loss])
    sequences.close()
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    parts = {key: gradients[key] * 0 if own.grad is None else own.grad for key, own in split.named_parameters()}
    for part in parts.values():
        dist.all_reduce(part)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    bound = 1e-12 * float(torch.nn.utils.get_total_norm(gradients.values()))
    for key, gradient in gradients.items():
        torch.testing.assert_close(parts[key] / 2, gradient, rtol=0, atol=bound, msg=key)


@in_ranks(
    world=4,
    cells=(
        ("fsdp", "hybrid_shard", "Qwen3Next", "allgather", "states"),
        ("deepspeed", "full_shard", "Mamba2", "ulysses", "heads"),
    ),
)
def test_four_ranks(backend, strategy, name, method, recurrences):
    """Key heads and groups are fewer than ranks."""
    groups = {"strategy": strategy, "group_size": 2} if strategy == "hybrid_shard" else strategy
    compared(configured(backend, groups, **sequence(method, recurrences, size=4)), name)


@in_ranks(
    cells=(
        ("fsdp", "Qwen3Next", "activation_checkpointing=full"),
        ("deepspeed", "Bamba", "precision=bf16"),
        ("fsdp", "Lfm2", "compile={mode: per_block, backend: eager}"),
        ("deepspeed", "Mamba2", "training.loss_chunk_tokens=5"),
    )
)
def test_beside_other_fields(backend, name, field):
    compared(configured(backend, "full_shard").override(field), name)


@in_ranks(cells=(("fsdp", "halo"), ("deepspeed", "states")))
def test_a_cut_is_seen(backend, cut):
    """The comparisons above would find a halo, or a state, that does not arrive."""
    target = (halo, "_halo") if cut == "halo" else (states, "beginnings")
    right = getattr(*target)
    cfg = configured(backend, **sequence(recurrences="states"))
    with (
        mock.patch.object(*target, lambda *given: right(*given) * 0),
        unishard.prepare(hybrid("Qwen3Next"), cfg) as engine,
    ):
        curve = trained(engine, cfg, "Qwen3Next", 1)
    reference, _ = expected("Qwen3Next")
    assert curve.norms[0] == pytest.approx(reference.norms[0], rel=0.5)
    assert abs(curve.losses[0] / reference.losses[0] - 1) > 1e-4


def marked(name: str) -> dict[str, torch.Tensor]:
    """Packed documents of which a batch says where they begin, as transformers' collator does for kernels."""
    batch = batch_of(samples(packed=True), 0)
    borders = [int((row == 0).nonzero()[1]) for row in batch["position_ids"]]
    for row, border in enumerate(borders):
        batch["labels"][row, border] = -100
    batch["seq_idx"] = torch.stack([(torch.arange(LENGTH) >= border).int() for border in borders])
    if name == "Qwen3Next":  # fla takes one row
        batch = {key: value[:1] for key, value in batch.items()}
        batch["cu_seq_lens_q"] = torch.tensor([0, borders[0], LENGTH], dtype=torch.int32)
    return batch


@in_ranks(
    cells=(
        ("fsdp", "Qwen3Next", True, "ulysses", ""),
        ("fsdp", "Qwen3Next", True, "allgather", "cu_seq_lens_q"),
        ("deepspeed", "Bamba", True, "allgather", ""),
        ("deepspeed", "Qwen3Next", False, "allgather", "position_ids"),
        ("fsdp", "Bamba", False, "ulysses", "position_ids"),
    )
)
def test_documents_that_are_apart(backend, name, installed, method, left_out):
    """As in one process with kernels: theirs keep documents apart in their own words, or join them where a batch does
    not say these, and ours keep them apart without kernels too, where positions say it or not."""
    plain, batch = hybrid(name), marked(name)
    given = {name: value for name, value in batch.items() if name != left_out}
    with kernels_for(plain):
        plain(**given if installed else batch).loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None]).item()
    cfg = configured(backend, "full_shard", **sequence(method, "states")).override(
        "training.gradient_accumulation_steps=1"
    )
    model = hybrid(name)
    with kernels_for(model) if installed else nullcontext() as kernels, unishard.prepare(model, cfg) as engine:
        (part,) = engine.batches([given])
        engine.backward(engine(**part).loss)
        found = engine.step().grad_norm
    assert found == pytest.approx(norm, rel=1e-5)
    if installed:
        apart = {"Qwen3Next": "delta rule", "Bamba": "mamba2"}
        assert kernels.apart == [] if left_out else {*kernels.apart} == {apart[name]}


@in_ranks(cells=EACH)
def test_an_own_model(backend):
    cfg = configured(backend, "full_shard", METHODS[BACKENDS.index(backend)])
    batch = batch_of(samples(), 0)
    targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    model = own_hybrid()
    logits = model(batch["input_ids"], torch.arange(LENGTH).expand(2, -1))
    functional.cross_entropy(logits.flatten(0, 1), targets).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with unishard.prepare(own_hybrid(), cfg.override("training.gradient_accumulation_steps=1")) as engine:
        (part,) = engine.batches([batch])
        logits = engine(part["input_ids"], part["position_ids"])
        targets = part["shift_labels"].flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        engine.backward(loss, num_items=(targets != -100).sum())
        own = {name: engine.gradients.read(name) for name in gradients}
        engine.discard()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=1e-6, msg=name)


@in_ranks(cells=EACH, in_turn=True)
def test_a_function_that_mixes_heads_is_refused(backend):
    cfg = configured(backend)
    with unishard.prepare(own_hybrid(Mixing), cfg) as engine:
        (part,) = engine.batches([batch_of(samples(), 0)])
        message = refused(engine, part["input_ids"], part["position_ids"])
    assert "over_all_heads is declared by unishard.by_heads, but what it computes for a head depends" in message


@in_ranks(cells=EACH, in_turn=True)
def test_other_models_of_the_class_and_generation_are_as_before(backend):
    """While a model is prepared, in its generation, and after it is released."""
    prompt = torch.randint(1, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(my_rank()))
    other = hybrid("Qwen3Next", use_cache=True).eval()
    functions = {
        name: vars(sys.modules[type(other).__module__])[name]
        for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    }
    before = other(input_ids=prompt).logits
    tokens = other.generate(prompt, max_new_tokens=4, do_sample=False)
    cfg, batch = configured(backend, "full_shard"), batch_of(samples(), 0)
    with unishard.prepare(hybrid("Qwen3Next", use_cache=True), cfg) as engine:
        engine.eval()
        during = other(input_ids=prompt).logits
        generated = engine.generate(prompt, max_new_tokens=4, do_sample=False)
        (part,) = engine.batches([batch])
        evaluated = engine.gather_for_metrics(engine(**part).logits)
        second = unishard.prepare(hybrid("Qwen3Next"), cfg)
        second.framework.release()
        again = engine(**part).loss
        loss = other(**batch).loss
        engine.framework.release()
    now = {name: vars(sys.modules[type(other).__module__])[name] for name in functions}
    assert torch.equal(during, before)
    assert torch.equal(generated, tokens)
    assert now == functions
    torch.testing.assert_close(evaluated, other(**batch).logits, rtol=0, atol=1e-5)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)


DOCUMENTS = ([((0, 24),)] * 2, [((0, 5), (5, 6), (6, 24)), ((0, 16), (16, 24))])


@in_ranks(world=4, cells=tuple((balanced, packed) for balanced in (False, True) for packed in (False, True)))
def test_own_functions_of_documents(balanced, packed):
    """Borders on any rank, parts shorter than the halo; outputs and gradients are those of each document by itself."""
    documents, generator = DOCUMENTS[packed], torch.Generator().manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    layout, group = PositionLayout(4, balanced=balanced), make_group(4)
    split = SplitBatch(group, layout, "ulysses", 24, 24, documents, False, set())
    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    within, taps = random(4, 8, 8), random(64, 6)
    functions = {
        "recurrence": lambda x: recurrence(x.unflatten(-1, (4, 16)), within).flatten(2),
        "convolution": lambda x: unishard.causal_conv(x.transpose(1, 2), taps).transpose(1, 2),
        "shift": lambda x: unishard.shift(x, 5),
    }
    for name, function in functions.items():
        whole = random(2, 24, 64).requires_grad_()
        rows = [
            torch.cat([function(row[None, a:b]) for a, b in of_row], 1)
            for row, of_row in zip(whole, documents, strict=True)
        ]
        wanted = torch.cat(rows)
        wanted.square().sum().backward()
        part = layout.take(whole.detach(), group.rank).requires_grad_()
        with in_float64():
            context.current = split
            made = function(part)
            context.current = None
            torch.autograd.backward(made.square().sum())
        for own, all_positions in ((made, wanted), (part.grad, whole.grad)):
            torch.testing.assert_close(own, layout.take(all_positions, group.rank), rtol=0, atol=1e-12, msg=name)
    dist.barrier()


def test_functions_of_another_release_are_left_as_they_are():
    """Where transformers has none of a name, or one with other arguments, the proof refuses the model."""
    model = hybrid("Mamba2")
    modeling = sys.modules[type(model).__module__]
    others = {"causal_conv1d_fn": None, "mamba2_chunk_scan": lambda x, dt: x}
    with mock.patch.multiple(modeling, **others):
        restore = use_split_functions(model)
        during = {name: vars(modeling)[name] for name in others}
        restore()
    assert during == others
