"""Long sequences: a group of ranks shares each sample, and training is that of plain torch in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness import BACKENDS, config, in_ranks, my_rank, refused
from harness.training import EACH
from sequence_models import LENGTH, TRANSFORMERS, Packed, batch_of, build, data_for
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing import oracle

UPDATES, WINDOW = 2, 2
"""The second update has the loss of weights that the first has changed, and the weights show its momentum."""


def configured(backend: str, strategy: Any = "no_shard", method: str = "auto", size: int = 2, **sections: Any) -> Any:
    training = {"micro_batch_size": 2, "gradient_accumulation_steps": WINDOW, "gradient_clipping": 0.5}
    sequence = {"size": size} | ({} if method == "auto" else {"method": method})
    sections = {"training": training, "parallel": {"sequence": sequence}} | sections
    return config(backend, strategy, **sections)


def trained(engine: Any, cfg: Any, name: str, updates: int = UPDATES) -> oracle.Curve:
    """The updates of an ordinary loop."""
    losses, norms, lrs, of_window = [], [], [], []
    for batch in engine.batches(unishard.dataloader(data_for(name), cfg, shuffle=False)):
        loss = engine(**batch).loss
        engine.backward(loss)
        of_window.append(engine.mean(loss))
        step = engine.step()
        if step.updated:
            losses.append(sum(of_window) / len(of_window))
            norms.append(step.grad_norm)
            lrs.append(step.lr)
            of_window = []
        if len(losses) == updates:
            break
    return oracle.Curve(tuple(losses), tuple(norms), tuple(lrs))


def expected(
    cfg: Any, name: str, readers: int, updates: int = UPDATES, model: Any = None
) -> tuple[oracle.Curve, dict[str, torch.Tensor]]:
    """What plain torch makes of the same samples in one process: the mean of the micro-batches' means."""
    given = cfg.precision.compute, name, readers, updates
    return _of_plain_torch(*given) if model is None else trained_plainly(model, *given)


@cache
def _of_plain_torch(compute: str, name: str, *given: int) -> tuple[oracle.Curve, dict[str, torch.Tensor]]:
    return trained_plainly(build(name), compute, name, *given)


def trained_plainly(
    model: Any, compute: str, name: str, readers: int, updates: int
) -> tuple[oracle.Curve, dict[str, torch.Tensor]]:
    data = data_for(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16")
    losses, norms, batches = [], [], WINDOW * readers
    for update in range(updates):
        total = 0.0
        for number in range(batches):
            with autocast:
                loss = model(**batch_of(data, 2 * (update * batches + number))).loss / batches
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return oracle.Curve(tuple(losses), tuple(norms), (0.1,) * updates), weights


def assert_equal(curve: oracle.Curve, reference: oracle.Curve, *, relative: float = 1e-6) -> None:
    assert curve.losses == pytest.approx(reference.losses, rel=relative)
    assert curve.norms == pytest.approx(reference.norms, rel=10 * relative)


def compared(cfg: Any, name: str, readers: int) -> None:
    """Train, and compare losses, norms and weights."""
    reference, weights = expected(cfg, name, readers)
    with unishard.prepare(build(name), cfg) as engine:
        curve = trained(engine, cfg, name)
        own = {key: engine.weights.read(key) for key in weights}
    relative = 1e-6 if cfg.precision.compute == "fp32" else 2e-2
    assert_equal(curve, reference, relative=relative)
    if cfg.precision.compute == "fp32":
        for key, value in weights.items():
            torch.testing.assert_close(own[key], value, rtol=0, atol=1e-5)


@in_ranks(world=4, cells=tuple((backend, size) for backend in BACKENDS for size in (2, 4)), in_turn=True)
def test_groups_beside_data_parallelism(backend, size):
    compared(configured(backend, "full_shard", size=size), "llama", readers=4 // size)


@in_ranks(cells=tuple((BACKENDS[number % 2], name) for number, name in enumerate(TRANSFORMERS) if name != "llama"))
def test_each_kind_of_attention(backend, name):
    compared(configured(backend), name, readers=1)


@in_ranks(
    cells=(
        ("fsdp", "allgather", "windows"),
        ("deepspeed", "allgather", "sinks"),
        ("fsdp", "allgather", "chunks"),
        ("deepspeed", "allgather", "encoder"),
    )
)
def test_balanced_positions(backend, method, name):
    compared(configured(backend, method=method), name, readers=1)


REFUSED = {
    "own attention": "blocks.0 (OwnAttention) mixes positions",
    "convolution": "blocks.0.mixer (Convolution) mixes positions",
    "recurrence": "blocks.0.mixer.gru (GRU) mixes positions",
    "running sum": "blocks.0.mixer (RunningSum) mixes positions",
    "counted positions": "Own counts positions",
    "pooling": "Own mixes positions",
    "begins at zero": "blocks.0.mixer.module (Convolution) mixes positions",
    "reaches far": "blocks.0.mixer (Gated) mixes positions",
    "normalized": "blocks.0.mixer.module (BatchNorm1d) mixes positions",
}


@in_ranks(
    cells=tuple(
        (BACKENDS[(number + first) % 2], name, precision)
        for number, name in enumerate(REFUSED)
        for first, precision in enumerate(("fp32", "bf16"))
        if (name, precision) != ("normalized", "bf16")  # torch does not compute it with statistics in fp32
    )
)
def test_what_mixes_positions_elsewhere_is_named(backend, name, precision):
    cfg = configured(backend, precision=precision)
    with unishard.prepare(build(name), cfg) as engine:
        batch = next(iter(engine.batches(unishard.dataloader(Packed(), cfg, shuffle=False))))
        message = refused(engine, batch["input_ids"], batch["position_ids"])
    assert REFUSED[name] in message
    assert ("position_ids" if name == "counted positions" else "unishard.attention") in message


@in_ranks(cells=tuple((backend, method) for backend in BACKENDS for method in ("ulysses", "allgather")), in_turn=True)
def test_an_own_model_and_an_own_loss(backend, method):
    cfg = configured(backend, method=method)
    model, batch = build("own"), batch_of(Packed(packed=False), 0)
    labels = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    logits = model(batch["input_ids"], torch.arange(LENGTH).expand(2, -1))
    functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with unishard.prepare(build("own"), cfg.override("training.gradient_accumulation_steps=1")) as engine:
        for part in engine.batches(unishard.dataloader(Packed(packed=False), cfg, shuffle=False)):
            logits = engine(part["input_ids"], part["position_ids"])
            targets = part["shift_labels"].flatten()
            loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            mean = refused(engine.backward, loss)
            engine.backward(loss, num_items=(targets != -100).sum())
            own = {name: engine.gradients.read(name) for name in gradients}
            break
        engine.discard()
    assert "engine.backward(loss_sum, num_items=number)" in mean
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=1e-6)


@in_ranks(cells=EACH, in_turn=True)
def test_evaluation_gives_whole_sequences(backend):
    cfg, data = configured(backend), Packed(5)
    plain = build("windows").eval()
    with torch.no_grad():
        logits = torch.cat([plain(**batch_of(data, first, 1)).logits for first in range(5)])
        loss = plain(**batch_of(data, 0)).loss
    with unishard.prepare(build("windows"), cfg) as engine:
        engine.eval()
        gathered, losses = [], []
        for batch in engine.batches(unishard.dataloader(data, cfg, shuffle=False)):
            output = engine(**batch)
            losses.append(output.loss.item())
            gathered.append(engine.gather_for_metrics(output.logits))
    torch.testing.assert_close(torch.cat(gathered), logits, rtol=0, atol=1e-5)
    assert losses[0] == pytest.approx(loss.item(), rel=1e-6)


@in_ranks(cells=EACH, in_turn=True)
def test_generation_is_of_whole_prompts(backend):
    prompt = torch.randint(1, 64, (1, 6 + my_rank()), generator=torch.Generator().manual_seed(my_rank()))
    plain = build("windows").eval().generate(prompt, max_new_tokens=4, do_sample=False)
    cfg = configured(backend)
    with unishard.prepare(build("windows"), cfg) as engine:
        engine.eval()
        part = next(iter(engine.batches(unishard.dataloader(Packed(), cfg, shuffle=False))))
        message = refused(engine.generate, part["input_ids"], max_new_tokens=2)
        tokens = engine.generate(prompt, max_new_tokens=4, do_sample=False)
        engine.train()
        curve = trained(engine, cfg, "windows", 1)
    assert "whole prompts" in message
    assert torch.equal(tokens, plain)
    assert_equal(curve, expected(cfg, "windows", 1, updates=1)[0])


@in_ranks(cells=EACH, in_turn=True)
def test_ranks_of_a_group_must_read_the_same_samples(backend):
    cfg = configured(backend)
    loader = torch.utils.data.DataLoader(Packed(), batch_size=2, sampler=[my_rank() + each for each in range(8)])
    with unishard.prepare(build("llama"), cfg) as engine:
        message = refused(lambda: next(iter(engine.batches(loader))))
    assert "ranks 0 to 1 share each sample" in message
    assert "unishard.dataloader" in message


@in_ranks(cells=EACH, in_turn=True)
def test_masks(backend):
    """Padding at either end, and a mask of four dimensions."""
    cfg = configured(backend, training={"micro_batch_size": 2})
    tokens = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    padded = torch.ones(2, 24, dtype=torch.long)
    padded[0, :5] = 0
    padded[1, 20:] = 0
    labels = tokens.where(padded.cumsum(1) * padded > 1, -100)  # of the first token a padding would predict it
    blocks = torch.zeros(2, 1, 24, 24, dtype=torch.bool)
    blocks[:, :, :9, :9] = blocks[:, :, 9:, 9:] = True
    blocks &= torch.ones(24, 24, dtype=torch.bool).tril()
    masks, outcomes = {"padded": padded, "blocks": blocks}, {}
    with unishard.prepare(build("llama"), cfg) as engine:
        engine.eval()
        for name, mask in masks.items():
            batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
            outcomes[name] = engine(**next(iter(engine.batches([batch])))).loss.item()
    plain = build("llama").eval()
    for name, mask in masks.items():
        loss = plain(input_ids=tokens, attention_mask=mask, labels=labels).loss.item()
        assert outcomes[name] == pytest.approx(loss, rel=1e-6), name


@in_ranks(cells=EACH, in_turn=True)
def test_samples_that_were_not_split_are_refused(backend):
    """As in a loop that reads its loader itself, or that of a framework; nor are parts without what belongs to them."""
    cfg, batch = configured(backend), batch_of(Packed(), 0)
    with unishard.prepare(build("llama"), cfg) as engine:
        yielded = next(iter(engine.batches([batch])))
        tokens = {"input_ids": yielded["input_ids"], "labels": yielded["labels"]}
        without_shift = refused(lambda: engine(**tokens, position_ids=yielded["position_ids"]))
        engine.discard()
        of_part = refused(lambda: engine(**tokens))
        engine.discard()
        whole = refused(lambda: engine(**batch))
        engine.discard()
        without_positions = refused(lambda: engine(input_ids=batch["input_ids"], labels=batch["labels"]))
        engine.discard()
        image = refused(lambda: next(iter(engine.batches([batch | {"pixel_values": torch.ones(2, 3, 4, 4)}]))))
        names = ("input_ids", "position_ids")
        part = {name: engine.split_sequence(batch[name], 0) for name in names}
        shape = engine(**part).logits.shape
        engine.discard()
    assert "samples that were not split" in whole
    assert "samples that were not split" in without_positions
    assert "pixel_values" in image
    assert "without shift_labels" in without_shift
    assert "without position_ids" in of_part
    assert shape == (2, 12, 64)


@in_ranks(cells=EACH, in_turn=True)
def test_recomputed_attention_of_an_own_model(backend):
    """It sees whole sequences again, also after another model has run that splits nothing."""
    batch, cfg = batch_of(Packed(packed=False), 0), configured(backend, activation_checkpointing=["Block"])
    cfg = cfg.override("training.gradient_accumulation_steps=1")
    model, targets = build("own"), batch["labels"].flatten()
    logits = model(batch["input_ids"], torch.arange(LENGTH).expand(2, -1))
    functional.cross_entropy(logits.flatten(0, 1), targets).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with unishard.prepare(build("own"), cfg) as engine:
        part = next(iter(engine.batches([batch])))
        logits = engine(part["input_ids"], part["position_ids"])
        alone = build("own")(batch["input_ids"], torch.arange(LENGTH).expand(2, -1))
        targets = part["labels"].flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        engine.backward(loss, num_items=(targets != -100).sum())
        own = {name: engine.gradients.read(name) for name in gradients}
        engine.discard()
    assert alone.shape == (2, LENGTH, 64)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=1e-6)


@in_ranks(cells=EACH, in_turn=True)
def test_a_prepare_that_fails_leaves_the_model_as_it_was(backend):
    model = build("windows")
    model.transposed = nn.Parameter(model.lm_head.weight.t())  # shares memory, which is refused when it is sharded
    message = refused(unishard.prepare, model, configured(backend))
    hooks = [*model._forward_hooks, *model._forward_pre_hooks]
    assert "share memory" in message
    assert model.config._attn_implementation == "sdpa"
    assert hooks == []
