"""What a unit's forward has of its caller: tensors in place of its weights, lists, attributes of its parameters; and
auxiliary losses that leave it by any way, also in later updates."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from types import SimpleNamespace

import torch
from harness import Scenario, in_ranks, own_share, refused, share_of
from harness.training import ACCUMULATION, MICRO_BATCH, configured
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput

IN, CLASSES = 13, 11
LOSSES = []
KEPT = ContextVar("KEPT")
TRACKER = SimpleNamespace(losses=deque())


class Auxiliary(Block):
    """Computes a loss after its output, from its weights."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, keep):
        y = x + super().forward(x)
        keep((self.scale * y).square().mean())
        return y


class Hidden(nn.Module):
    """Blocks whose auxiliary losses leave them otherwise than in their output."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.stem, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Auxiliary() for _ in range(2))

    def keep(self, loss):
        if self.way == "global":
            LOSSES.append(loss)
        elif self.way == "contextvar":
            KEPT.set([*KEPT.get(), loss])
        elif self.way == "alone" or self.late:
            TRACKER.losses.append(loss)

    def forward(self, x, labels, number):
        LOSSES.clear(), KEPT.set([]), TRACKER.losses.clear()
        self.late = bool((number >= ACCUMULATION).all())
        x, closed = self.stem(x), []
        for layer in self.layers:
            x = layer(x, closed.append if self.way == "closure" else self.keep)
        auxiliary = sum((*LOSSES, *KEPT.get(), *TRACKER.losses, *closed))
        logits = self.head(x)
        if self.way == "alone":  # the last block's output reaches no loss
            return MlpOutput(auxiliary, None)
        return MlpOutput(functional.cross_entropy(logits.float(), labels) + auxiliary, logits)


class Generated(nn.Module):
    """Layers whose weights another one computes, or that are called with those of all of them."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.stem, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.code, self.weights = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, x, labels):
        x = self.stem(x)
        for layer in self.layers:
            weight = self.weights(self.code.to(x)).view(WIDTH, WIDTH)
            if self.way == "vmap":
                stacked = {"up.weight": torch.stack([weight, weight.t()]), "up.bias": torch.zeros(2, WIDTH).to(weight)}
                called = vmap(lambda given, x, layer=layer: functional_call(layer, given, (x,)), in_dims=(0, None))
                x = x + called(stacked, x).sum(0) + (layer(x) if self.way == "both" else 0)
            else:
                x = x + functional_call(layer, {"up.weight": weight}, (x,))
            if self.way == "both":
                x = x + layer(x)
        logits = self.head(x)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Given(Block):
    """Scales its weight by an attribute of it, and adds to a list and a dict of its caller."""

    def __init__(self):
        super().__init__()
        self.up.weight.factor = 0.5

    def forward(self, x, losses, state):
        y = torch.tanh(functional.linear(x, self.up.weight * getattr(self.up.weight, "factor", 1.0), self.up.bias))
        losses.append(y.square().mean())
        state["last"] = y
        return x + y, state


class Caller(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.stem, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Given() for _ in range(3))

    def forward(self, x, labels):
        x = self.stem(x)
        losses, state = [], {"first": x}
        for layer in self.layers:
            x, _ = layer(x, losses, state)
        logits = self.head(x + state["last"])
        return MlpOutput(functional.cross_entropy(logits.float(), labels) + sum(losses), logits)


def numbered(number, rank):
    return share_of(number, rank) | {"number": torch.full((MICRO_BATCH,), number)}


MODELS = {
    **dict.fromkeys(("global", "contextvar", "closure", "late", "alone"), (Hidden, "Auxiliary")),
    **dict.fromkeys(("functional_call", "both", "vmap"), (Generated, "Block")),
    "caller": (Caller, "Given"),
}
ENGINES = (("full_shard", "fp32", "none"), ("shard_grad_op", "bf16", "none"), ("full_shard", "bf16", "full"))
"""Strategy, precision, and activation checkpointing."""
CELLS = tuple(
    (kind, *engine)
    for kind in MODELS
    for engine in ENGINES
    # The oracle's 16-bit copies of parameters have no attributes.
    if MODELS[kind][0] is Hidden or (engine[2] == "none" and (kind, engine[1]) != ("caller", "bf16"))
)


@in_ranks(cells=CELLS)
def test_it_trains_as_in_plain_torch(kind, strategy, precision, recomputes):
    model, unit = MODELS[kind]
    cfg = configured("fsdp", {"strategy": strategy, "units": [unit]}, precision, activation_checkpointing=recomputes)
    Scenario(model, (kind,), numbered if model is Hidden else share_of).judge(cfg)


@in_ranks
def test_a_recomputed_forward_with_other_tensors_is_refused():
    cfg = configured("fsdp", {"strategy": "full_shard", "units": ["Block"]}, activation_checkpointing="full")
    with unishard.prepare(Generated("both"), cfg) as engine:
        said = refused(engine, **own_share(1)[0])
    assert said.startswith("ModelError: the forward that reads layers.0.up.weight was called with another tensor")
