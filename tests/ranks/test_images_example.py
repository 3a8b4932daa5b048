"""examples/train_images.py: mixup, label smoothing, the average, early stopping and the best checkpoint train as in plain
torch on the ranks' batches together."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

import unishard
from unishard.testing import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "train_images.py"
EPOCHS, STEPS = 4, 8


def script():
    return runpy.run_path(str(SCRIPT))


def train(folder, backend):
    """Run it as `unishard launch` would; each rank returns what it printed and the mixed batches that it trained on."""
    changes = [f"backend={backend}", f"checkpoint.dir={folder}/runs"]
    os.environ |= {"UNISHARD_CONFIG": str(SCRIPT.with_suffix(".yaml")), "UNISHARD_OVERRIDES": json.dumps(changes)}
    sys.argv = [str(SCRIPT), "--epochs", str(EPOCHS), "--patience", "1", "--export", f"{folder}/model"]
    names = script()
    batches, mixed = [], names["mixed"]

    def recorded(*args, **kwargs):
        batches.append(mixed(*args, **kwargs))
        return batches[-1]

    names["main"].__globals__["mixed"] = recorded
    with redirect_stdout(StringIO()) as printed:
        names["main"]()
    return [float(found) for found in re.findall(r"accuracy (\S+)", printed.getvalue())], batches


def plain(batches):
    """The averaged weights of the best epoch, and its accuracy in each, of one process on the batches of all ranks."""
    names = script()
    cfg = unishard.load(SCRIPT.with_suffix(".yaml"))
    torch.manual_seed(cfg.training.seed)
    model, average = names["network"](), names["network"]()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay)
    held_out, found, best = names["images"](128, seed=1), [], {}
    pixels, labels = (torch.stack([each[name] for each in held_out]) for name in ("pixels", "label"))
    for step, (images, targets) in enumerate(batches):
        functional.cross_entropy(model(images), targets, label_smoothing=0.1).backward()
        clip_grad_norm_(model.parameters(), cfg.training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
            if (step + 1) % STEPS == 0:
                found.append((average(pixels).argmax(-1) == labels).float().mean().item())
                if found[-1] == max(found):
                    best = {name: value.clone() for name, value in average.state_dict().items()}
    return [*found, max(found)], best


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_it_trains_as_plain_torch(backend, tmp_path):
    (printed, mine), (_, others) = run_ranks(2, train, str(tmp_path), backend, timeout=200)
    together = [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(mine, others, strict=True)]
    assert len(together) % STEPS == 0
    accuracies, best = plain(together)
    assert printed == pytest.approx(accuracies, abs=1e-4)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    assert_close(load_file(file), best, rtol=1e-5, atol=1e-6)
