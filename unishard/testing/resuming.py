"""Compares resumed runs with uninterrupted ones: saved by one engine, strategy and number of ranks, resumed by
another.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import unishard
from unishard.checkpoint import manifest, tensor_names
from unishard.config import Config
from unishard.config.nested import merge
from unishard.contract.tolerances import TOLERANCES
from unishard.testing.models import MODELS, llama
from unishard.testing.ranks import run_ranks

BEFORE, AFTER = 5, 20
"""Optimizer steps before and after the checkpoint."""
_MICRO_BATCHES = 4
"""Micro-batches of all ranks in one optimizer step, with `_SAMPLES` samples each."""
_SAMPLES = 2
_DATASET = 96
"""Number of samples: the checkpoint is in the middle of an epoch, and more epochs follow."""
_ADAM = {"fp32": {"lr": 3e-3}, "fp16": {"lr": 3e-3}, "bf16": {"lr": 1e-3, "eps": 1e-4}}
"""In bf16 a larger eps, else the last digit of a gradient near zero becomes a full step, which flips roundings of
weights."""


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The settings of a run."""

    backend: str
    strategy: str
    world: int
    precision: str = "fp32"
    feature: str = "plain"
    """A name in `FEATURES`."""

    def __str__(self) -> str:
        feature = "" if self.feature == "plain" else f"{self.feature}-"
        return f"{feature}{self.backend}-{self.strategy}-{self.precision}-{self.world}ranks"


FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "offloaded": {"offload": {"optimizer": "cpu"}},
    "all_offloaded": {"offload": {"optimizer": "cpu", "params": "cpu"}},
    "hybrid": {"sharding": {"group_size": 2}},
}
"""Config sections that change where state is kept."""


class Pair(NamedTuple):
    """A run that saves, and a run that resumes."""

    saved: ResumedRun
    resumed: ResumedRun

    def __str__(self) -> str:
        return f"{self.saved}-to-{self.resumed}"


class Resumption(NamedTuple):
    """The result of a pair."""

    first_losses: float
    """Largest relative deviation of the first three losses after the checkpoint from those of the uninterrupted run."""
    losses: float
    """The same for all losses after the checkpoint."""
    same_bits: bool
    """Whether all losses and all final parameters equal those of the uninterrupted run bit by bit."""
    same_state: bool
    """Whether the loaded state, saved again immediately, has the same hash for every tensor of the model and the
    optimizer."""


def measure(pairs: Sequence[Pair], after: int = AFTER, before: int = BEFORE) -> dict[Pair, Resumption]:
    """Train, save, load and train on. Each source runs once, and all runs of a world size share processes.

    Args:
        pairs: Which runs resume which.
        after: Optimizer steps after the checkpoint, at most `AFTER`; the first ones are the same for any number.
        before: Optimizer steps before it.
    """
    with tempfile.TemporaryDirectory(prefix="resuming-") as folder:
        expected: dict[ResumedRun, _Rest] = {}
        for world, runs in _by_world(dict.fromkeys(pair.saved for pair in pairs)).items():
            answers = run_ranks(world, _save_all, runs, folder, after, before, timeout=60 + 20 * len(runs))
            expected |= dict(zip(runs, answers[0], strict=True))
        resumed_runs: dict[Pair, _Rest] = {}
        for world, resumed in _by_world(dict.fromkeys(pair.resumed for pair in pairs)).items():
            here = [pair for pair in pairs if pair.resumed in resumed]
            answers = run_ranks(world, _resume_all, here, folder, after, before, timeout=60 + 20 * len(here))
            resumed_runs |= dict(zip(here, answers[0], strict=True))
    return {pair: _compare(expected[pair.saved], resumed_runs[pair]) for pair in pairs}


def holds(pair: Pair, resumption: Resumption) -> bool:
    """Whether a result is as expected: bit-equal for the same run, else within the bounds of the conformance suite."""
    bound = TOLERANCES[pair.saved.precision]
    if pair.saved == pair.resumed and not resumption.same_bits:
        return False
    return resumption.same_state and resumption.first_losses <= bound.first_losses and resumption.losses <= bound.losses


class _Rest(NamedTuple):
    """The part of a run after the checkpoint."""

    losses: tuple[float, ...]
    digest: str
    """Hash of all final parameters."""
    hashes: tuple[tuple[str, str], ...]
    """Hash of each tensor of the model and the optimizer, in the checkpoint or in the one saved right after loading."""


def _by_world(runs: Iterable[ResumedRun]) -> dict[int, list[ResumedRun]]:
    worlds: dict[int, list[ResumedRun]] = {}
    for run in runs:
        worlds.setdefault(run.world, []).append(run)
    return worlds


def _compare(expected: _Rest, resumed: _Rest) -> Resumption:
    deviations = [abs(now - then) / abs(then) for then, now in zip(expected.losses, resumed.losses, strict=True)]
    return Resumption(
        first_losses=max(deviations[:3]),
        losses=max(deviations),
        same_bits=expected.losses == resumed.losses and expected.digest == resumed.digest,
        same_state=expected.hashes == resumed.hashes,
    )


def _config(run: ResumedRun) -> Config:
    sections: dict[str, Any] = {
        "backend": run.backend,
        "sharding": {"strategy": run.strategy},
        "precision": {"compute": run.precision},
        "training": {
            "micro_batch_size": _SAMPLES,
            "gradient_accumulation_steps": _MICRO_BATCHES // run.world,
            "gradient_clipping": 0.5,
            "seed": 11,
        },
        "optimizer": {
            "name": "adamw",
            **_ADAM[run.precision],
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "no_decay": ["norm"],
        },
        "scheduler": {"name": "cosine", "warmup_steps": 3, "total_steps": BEFORE + AFTER, "min_lr_ratio": 0.1},
        "communication": {"desync_check": False},  # changes no figure
    }
    return Config.model_validate(merge(sections, FEATURES[run.feature]))


def _prepare(run: ResumedRun, seed: int) -> unishard.Engine:
    return unishard.prepare(llama(seed, tie_word_embeddings=True), _config(run))


def _dataset() -> Any:
    return [MODELS["llama"].sample(index) for index in range(_DATASET)]


def _updates(engine: unishard.Engine, loader: Any) -> Iterator[float]:
    """Yields the mean loss over ranks and micro-batches of each optimizer step, epoch after epoch."""
    window: list[float] = []
    while True:
        for batch in engine.batches(loader):
            loss = engine(**batch).loss
            engine.backward(loss)
            window.append(engine.mean(loss))
            if engine.step().updated:
                yield sum(window) / len(window)
                window = []


def _rest(engine: unishard.Engine, updates: Iterator[float], folder: Path, after: int) -> _Rest:
    losses = tuple(islice(updates, after))
    digest = hashlib.sha256()
    for name, _ in engine.module.named_parameters():
        digest.update(engine.weights.read(name).cpu().numpy().tobytes())
    tensors = manifest.read(folder).tensors
    hashes = [
        (name, facts.hash)
        for name, facts in tensors.items()
        if name.startswith((tensor_names.PARAMETERS, tensor_names.OPTIMIZER))
    ]
    return _Rest(losses, digest.hexdigest(), tuple(hashes))


def _save_all(runs: Sequence[ResumedRun], root: str, after: int, before: int) -> list[_Rest]:
    answers = []
    for run in runs:
        with _prepare(run, seed=7) as engine:
            updates = _updates(engine, unishard.dataloader(_dataset(), _config(run)))
            for _ in islice(updates, before):
                pass
            folder = engine.save(Path(root) / str(run))
            answers.append(_rest(engine, updates, folder, after))
    return answers


def _resume_all(pairs: Sequence[Pair], root: str, after: int, before: int) -> list[_Rest]:
    answers = []
    for pair in pairs:
        with _prepare(pair.resumed, seed=8) as engine:
            resumed = engine.load(Path(root) / str(pair.saved), verify="bits")
            assert resumed is not None
            assert resumed.step == before
            again = engine.save(Path(root) / f"{pair}-again")
            answers.append(
                _rest(engine, _updates(engine, unishard.dataloader(_dataset(), _config(pair.resumed))), again, after)
            )
    return answers
