"""The tiny training of most tests: a model, a config and each rank's share of the data, and what the oracle makes of
the same."""

from __future__ import annotations

from typing import Any

import unishard
from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.cells import MICRO_BATCH
from unishard.testing.models import MODELS, batch

ADAMW = {"name": "adamw", "lr": 1e-2}
ACCUMULATION, UPDATES = 2, 3
"""Of `configured` and `windows`."""
MICRO_BATCHES = ACCUMULATION * UPDATES


def config(backend: str, strategy: Any = "full_shard", **sections: Any) -> Config:
    """A config for the MLP under SGD with momentum, which shows what AdamW hides; a section that is None is left out.

    Without the desync check, which changes no figure and takes a quarter of the time of so short a run: see `checked`.
    """
    sections["training"] = {"micro_batch_size": MICRO_BATCH} | sections.get("training", {})
    sections.setdefault("communication", {"desync_check": False})
    sections.setdefault("optimizer", {"name": "sgd", "lr": 0.1, "momentum": 0.9})
    given = {name: section for name, section in sections.items() if section is not None}
    return Config.model_validate({"backend": backend, "sharding": strategy, **given})


def checked(backend: str, strategy: Any = "full_shard", **sections: Any) -> Config:
    """`config` with the desync check, as a user has it."""
    return config(backend, strategy, **({"communication": {}} | sections))


def configured(backend: str, sharding: Any, precision: Any = "fp32", **sections: Any) -> Config:
    """Windows of two micro-batches, clipped in every update."""
    training = {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.5}
    return config(backend, sharding, precision=precision, training=training, **sections)


def prepare(cfg: Config, model: str = "mlp") -> Any:
    """The tiny model, prepared."""
    return unishard.prepare(MODELS[model].build(), cfg)


def my_rank() -> int:
    """This process among the ranks."""
    return unishard.Topology.from_environment().rank


def share(count: int, *, rank: int, world: int, model: str = "mlp") -> list[dict[str, Any]]:
    """A rank's first `count` micro-batches."""
    return [batch(model, (turn * world + rank) * MICRO_BATCH, MICRO_BATCH) for turn in range(count)]


def own_share(count: int, model: str = "mlp") -> list[dict[str, Any]]:
    """This rank's first `count` micro-batches."""
    topology = unishard.Topology.from_environment()
    return share(count, rank=topology.rank, world=topology.world_size, model=model)


def everyones(start: int, stop: int, *, world: int, model: str = "mlp") -> list[dict[str, Any]]:
    """Micro-batches `start` to `stop - 1` of all ranks: one accumulation window for the oracle."""
    shares = [share(stop, rank=rank, world=world, model=model) for rank in range(world)]
    return [shares[rank][turn] for turn in range(start, stop) for rank in range(world)]


def windows(model: str = "mlp", updates: int = UPDATES) -> list[list[dict[str, Any]]]:
    """What the oracle trains on when each of 2 ranks has `own_share(ACCUMULATION * updates)`."""
    starts = range(0, ACCUMULATION * updates, ACCUMULATION)
    return [everyones(start, start + ACCUMULATION, world=2, model=model) for start in starts]


def update(engine: Any, micro_batch: dict[str, Any], **step: Any) -> Any:
    """One micro-batch: its `Step`."""
    engine.backward(engine(**micro_batch).loss)
    return engine.step(**step)


def train(engine: Any, micro_batches: Any, **step: Any) -> list[tuple[float, Any]]:
    """Mean loss over the ranks and `Step` of each micro-batch."""
    done = []
    for micro_batch in engine.batches(micro_batches):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        done.append((engine.mean(loss), engine.step(**step)))
    return done


def losses_of(engine: Any, micro_batches: Any) -> list[float]:
    """Mean loss over the ranks of each micro-batch, trained."""
    return [loss for loss, _ in train(engine, micro_batches)]


def curve(done: list[tuple[float, Any]]) -> oracle.Curve:
    """Of single micro-batches, the updates: mean loss, norm, lr."""
    losses, norms, lrs, window = [], [], [], []
    for loss, step in done:
        window.append(loss)
        if step.updated:
            losses.append(sum(window) / len(window))
            norms.append(step.grad_norm)
            lrs.append(step.lr)
        if step.updated or step.skipped:
            window = []
    return oracle.Curve(tuple(losses), tuple(norms), tuple(lrs))
