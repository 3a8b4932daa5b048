"""Scripts of Accelerate that tests run plain and on engines, on ranks."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import accelerate
import torch
from harness import my_rank, refused
from torch import nn


def accelerator(backend, strategy="full_shard", **options):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    if backend == "plain":
        return accelerate.Accelerator(cpu=True, **options)
    return made({"backend": backend, "sharding": strategy}, **options)


def made(source, **options):
    from unishard.integrations.accelerate import Accelerator

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return Accelerator(source, **options)


def model_and_data(samples=28):
    torch.manual_seed(0)
    data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(samples, 4)]
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1)), data


def parts(acc, samples=28):
    """What a script prepares: of 7 batches each window but the last has two."""
    model, data = model_and_data(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    return acc.prepare(model, optimizer, loader, scheduler)


def epoch(acc, model, optimizer, loader, scheduler):
    found = []
    model.train()
    for batch in loader:
        with acc.accumulate(model):
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            acc.backward(loss)
            if acc.sync_gradients:
                found.append(float(acc.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(acc.reduce(loss.detach(), "mean").item())
    model.eval()
    with torch.no_grad():
        rows = [acc.gather_for_metrics(model(batch["x"])) for batch in loader]
    return [*found, optimizer.param_groups[0]["lr"], len(torch.cat(rows)), torch.cat(rows).sum().item()]


def weights(acc, model):
    state = acc.get_state_dict(model)
    return {name: value.double().sum().item() for name, value in state.items()} if my_rank() == 0 else {}


def accumulated(*cell):
    """`accumulate`, with a short last window."""
    acc = accelerator(*cell, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = parts(acc)
    found = [epoch(acc, model, optimizer, loader, scheduler) for _ in range(3)]
    state = weights(acc, model)
    acc.free_memory()
    return found, state


class Layers(nn.Module):
    """Two layers."""

    def __init__(self, inner, outer):
        super().__init__()
        self.first, self.second = nn.Linear(inner, 16), nn.Linear(16, outer)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def against_each_other(backend, strategy, freezes=True):
    """A generator and its judge, through which the generator's loss goes, each clipped, over windows of two."""
    acc = accelerator(backend, strategy, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.randn(28, 4), batch_size=2)
    maker, judge = Layers(4, 4), Layers(4, 1)
    makes, judges = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (maker, judge))
    maker, judge, makes, judges, loader = acc.prepare(maker, judge, makes, judges, loader)
    softplus, found = nn.functional.softplus, []
    for x in loader:
        with acc.accumulate(maker, judge):
            made_up = maker(x / 2)
            losses = [(softplus(judge(made_up.detach())) + softplus(-judge(x))).mean()]
            acc.backward(losses[0])
            if acc.sync_gradients:
                found.append(float(acc.clip_grad_norm_(judge.parameters(), 0.5)))
            judges.step()
            judges.zero_grad()
            with frozen(acc, judge) if freezes else nullcontext():
                losses.append(softplus(-judge(made_up)).mean())
                acc.backward(losses[1])
            if acc.sync_gradients:
                found.append(float(acc.clip_grad_norm_(maker.parameters(), 0.5)))
            makes.step()
            makes.zero_grad()
        found += [acc.reduce(loss.detach(), "mean").item() for loss in losses]
    acc.free_memory()
    return found


@contextmanager
def frozen(acc, model):
    """As Accelerate's own run freezes a model, and as engines do."""
    if hasattr(acc, "engine_of"):
        with acc.engine_of(model).weights.frozen():
            yield
        return
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


def refused_for_several(backend):
    """A loss that would train both models, and one through a model that the script froze."""
    found = [refused(against_each_other, backend, "full_shard", False)]
    acc = accelerator(backend)
    model, _, loader, _ = parts(acc)
    model.requires_grad_(False)
    found.append(refused(model, next(iter(loader))["x"]))
    acc.free_memory()
    found.append(refused(acc.backward, torch.ones((), requires_grad=True)))
    return found


PRECISIONS = {"fp32": "fp32", "fp16": "fp16", "static": {"compute": "fp16", "loss_scale": 256}}


def in_precision(backend, name):
    """Losses, which updates were skipped, and the rate at the end."""
    precision = PRECISIONS[name]
    acc = made({"backend": backend, "sharding": "full_shard", "precision": precision}, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = parts(acc)
    found, skipped = [], []
    for _ in range(2):
        for batch in loader:
            with acc.accumulate(model):
                loss = (model(batch["x"]).float() - batch["y"]).square().mean()
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(acc.reduce(loss.detach(), "mean").item())
            if acc.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
    acc.free_memory()
    return found, skipped, optimizer.param_groups[0]["lr"]
