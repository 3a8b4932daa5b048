"""Loops of Fabric that tests run plain and on engines, on ranks."""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric
from lightning_programs import data, problem
from torch import nn

from unishard.integrations.lightning import UnishardFabricStrategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.net(x) * self.scale

    def error(self, x, y):
        return (self(x) - y).square().mean() + 0.1 * self.scale.square().sum()


def begun(backend, sharding="full_shard", **sections):
    os.environ.setdefault("WORLD_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    cfg = {"backend": backend, "sharding": sharding, **sections}
    given = "ddp" if backend == "plain" else UnishardFabricStrategy(cfg)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=given)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    return fabric


def made(fabric):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("error")
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data(), batch_size=2))
    return model, optimizer, schedule, loader


def epoch(fabric, model, optimizer, schedule, loader):
    losses, norms = [], []
    for index, batch in enumerate(loader):
        last = index % 2 == 1 or index == len(loader) - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model.error(**batch)
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach().clone()).item())
        if last:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, norms


def train(backend, sharding, folder=None, load=None, epochs=2):
    """Losses and norms by epoch; the rate, and what the model says at the end."""
    fabric = begun(backend, sharding)
    parts = model, optimizer, schedule, _ = made(fabric)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    if load is not None:
        fabric.load(load, state)
    found = [epoch(fabric, *parts) for _ in range(epochs - state["epoch"])]
    state["epoch"] = epochs
    if folder is not None:
        fabric.save(folder, state)
        fabric.save(folder, state)  # again, over the first
    model.eval()
    with torch.no_grad():
        said = model(torch.ones(2, 4)).flatten().tolist()
    return {
        "losses": [each for losses, _ in found for each in losses],
        "norms": [each for _, norms in found for each in norms],
        "lr": [schedule.get_last_lr()[0], optimizer.param_groups[0]["lr"]],
        "said": said,
    }


def layers_together(backend):
    """A scheduler of torch with a rate for each group, over layers that ranks have together; plain without a backend."""
    from tensor_models import build

    fabric, model = begun(backend, parallel={"tensor": 2}) if backend else None, build("biased")
    wide = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.SGD([{"params": wide, "lr": 0.1}, {"params": others, "lr": 0.05}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.9**step])
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
    found = []
    for number in range(4):
        ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss) if fabric is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append((loss.item(), *sorted({group["lr"] for group in optimizer.param_groups})))
    return found


def two_models(backend, names):
    """A generator and its judge, each with its optimizer; the judge's step has two backwards."""
    fabric = begun(backend)
    pairs = []
    for model in (nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), nn.Linear(4, 1)):
        pairs.append(fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    (generator, generates), (judge, judges) = pairs
    losses = []
    for batch in data(6)[fabric.global_rank :: 2]:
        for x, sign in ((generator(batch["x"][None, :2]).detach(), 1), (batch["x"][None], -1)):
            fabric.backward(sign * judge(x).mean(), model=judge if names else None)
        judges.step()
        judges.zero_grad()
        loss = (generator(batch["x"][None, :2]) - batch["x"]).square().mean()
        fabric.backward(loss, model=generator if names else None)
        generates.step()
        generates.zero_grad()
        losses.append(fabric.all_reduce(loss.detach().clone()).item())
    return losses


def refusals(folder):
    fabric = begun("fsdp")
    model, optimizer, _, _ = made(fabric)
    path, other, batch = f"{folder}/plain.pt", Model(), {name: value[None] for name, value in data(1)[0].items()}
    torch.save({"model": other.state_dict(), "optimizer": torch.optim.AdamW(other.parameters()).state_dict()}, path)
    found = {
        "two optimizers": problem(
            lambda: fabric.setup(other, *(torch.optim.SGD(other.parameters(), lr=0.1) for _ in range(2)))
        ),
        "apart": problem(lambda: fabric.setup_optimizers(torch.optim.SGD(other.parameters(), lr=0.1))),
        "by value": problem(lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0)),
        "no model": problem(lambda: fabric.save(folder, {"epoch": 1})),
        "filter": problem(lambda: fabric.save(folder, {"model": model}, filter={"model": lambda name, value: True})),
        "optimizer of a file": problem(lambda: fabric.load(path, {"model": model, "optimizer": optimizer})),
        "precision": problem(lambda: Fabric(precision="16-true", strategy=UnishardFabricStrategy({}))),
    }
    torch.save(other.state_dict(), f"{folder}/raw.pt")
    fabric.load_raw(f"{folder}/raw.pt", model)
    model.eval()
    assert torch.equal(model(batch["x"]), other(batch["x"]).detach())
    model.train()
    fabric.save(f"{folder}/kept", {"model": model, "optimizer": optimizer})
    optimizer.param_groups[0]["weight_decay"] = 0.5
    fabric.load(f"{folder}/kept", {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    found["missing"] = problem(lambda: fabric.load(f"{folder}/kept", {"model": model, "more": 1}))
    fabric.load(f"{folder}/kept", {"model": model, "more": 1}, strict=False)
    fabric.backward(model.error(**batch) * float("inf"))
    found["infinite"] = problem(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    optimizer.step()  # is skipped
    fabric.backward(model.error(**batch))
    found["norm type"] = problem(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1))
    optimizer.step()
    alone = fabric.setup(nn.Linear(4, 1))
    assert not alone(batch["x"]).requires_grad
    loss = model.error(**batch)
    found["inference"] = problem(lambda: fabric.backward(loss, model=alone))
    other = Model()
    second, steps = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    found["both models"] = problem(lambda: fabric.backward(loss + second(batch["x"]).mean()))
    fabric.backward(second(batch["x"]).mean(), model=second)
    found["zero"] = problem(steps.zero_grad)
    return found
