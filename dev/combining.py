"""Trains random combinations of settings beside plain torch, each continued by another combination: `make combinations`.

    python -m dev.combining                         # 16 combinations, 2 ranks
    python -m dev.combining --ranks 4 --seed 7      # others, at 4

A run makes two updates with one combination, saves, and makes two more with another one, on either engine. The model,
the optimizer, its schedule, the precision and the windows stay.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import unishard
from unishard.config import Config
from unishard.config.nested import merge
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.errors import UnishardError
from unishard.testing import oracle, run_ranks
from unishard.testing.cells import BACKENDS, MICRO_BATCH, STRATEGIES, Recorder
from unishard.testing.conformance import compare
from unishard.testing.features import FEATURES
from unishard.testing.models import MODELS, TestModel, batch_of
from unishard.testing.oracle import Curve

UPDATES = 2
"""Of each of the two parts of a run."""
_ROUNDED = Tolerance(
    5e-4, 5e-3, 5e-3, 5e-2, "parts of sums are rounded to 16 bits, and later one flipped rounding grows"
)
_HYBRID = {"sharding": {"group_size": 2}}
_FILES = {"nvme_path": "."}


Choices = tuple[tuple[Mapping[str, Any], ...], ...]
"""Sections of a config, of each of which one is taken."""


class Kind(NamedTuple):
    """A model, and the values of `parallel`: a run has those of one group, whose ranks share as many samples."""

    model: TestModel
    parallel: Choices = (({},),)
    more: Choices = ()
    """As `FREE`."""


def _of(feature: str) -> TestModel:
    return next(iter(FEATURES[feature].models.values()))


_DENSE: Choices = (({},), ({"tensor": 2}, {"sequence": 2}))
_MIXTURE: Choices = (({}, {"expert": 2}), ({"sequence": 2}, {"sequence": 2, "expert": 2}))
_WORDS: Choices = (({}, {"training": {"loss_chunk_tokens": 5}}),)
KINDS = {
    "mlp": Kind(MODELS["mlp"]),
    "llama": Kind(_of("tensor_recomputed"), _DENSE, _WORDS),
    "tied": Kind(_of("tensor"), _DENSE, _WORDS),
    "lora": Kind(_of("lora"), more=_WORDS),
    "mixtral": Kind(_of("experts"), _MIXTURE, _WORDS),
    "conditional": Kind(_of("routed_experts"), more=(({"sharding": {"conditional_modules": ["Expert"]}},),)),
}
KEPT: Choices = (
    (
        {"optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}},
        {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
        {"optimizer": {"name": "adagrad", "lr": 0.01}},
        {"optimizer": {"name": "lion", "lr": 1e-4}},
        {"optimizer": {"name": "muon", "lr": 0.02, "adamw_lr": 3e-3, "ns_dtype": "fp32"}},
        {"optimizer": {"name": "adamw_8bit", "lr": 3e-3}},
    ),
    (
        {"scheduler": {"name": "cosine", "total_steps": 20}},
        {"scheduler": {"name": "wsd", "warmup_steps": 1, "decay_steps": 2, "total_steps": 2 * UPDATES}},
        {},
    ),
    (
        {"precision": "fp32"},
        {"precision": "fp32"},
        {"precision": {"compute": "bf16"}},
        {"precision": {"compute": "bf16", "keep_fp32": ["norm"]}},
        {"precision": {"compute": "bf16", "master": "bf16"}},
        {"precision": {"compute": "fp16", "initial_loss_scale": 4096.0, "loss_scale_growth_interval": 2}},
    ),
    (
        {"training": {"gradient_accumulation_steps": 1}},
        {"training": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}},
        {"training": {"gradient_accumulation_steps": 3, "batch_ramp": [[0, 1], [1, 2], [3, 3]]}},
    ),
)
"""One of each for the whole run."""
FREE: Choices = (
    tuple({"backend": backend} for backend in BACKENDS),
    (
        *({"sharding": {"strategy": strategy}} for strategy in STRATEGIES),
        *(
            merge({"sharding": {"strategy": strategy}}, _HYBRID)
            for strategy in ("hybrid_shard", "hybrid_shard_grad_op")
        ),
    ),
    (
        {},
        {},
        {"offload": {"optimizer": "cpu"}},
        {"offload": {"params": "cpu", "optimizer": "cpu"}},
        {"offload": {"optimizer": "nvme"} | _FILES},
        {"offload": {"params": "nvme", "optimizer": "nvme"} | _FILES},
        {"offload": {"params": "nvme"} | _FILES},
    ),
    ({}, {}, {"offload": {"activations": "cpu"}}),
    ({}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
    ({}, {}, {}, {"compile": {"mode": "per_block", "backend": "aot_eager"}}),
    ({}, {}, {"sharding": {"replicate": ["norm"]}}),
    ({}, {}, {"sharding": {"reshard_after_forward": False}}),
)
"""One of each for each part of it."""


class Combination(NamedTuple):
    """A run of two parts."""

    kind: str
    parts: tuple[Mapping[str, Any], Mapping[str, Any]]

    def __str__(self) -> str:
        return f"{self.kind} {json.dumps(self.parts)}"


def drawn(seed: int, count: int, ranks: int) -> Iterator[Combination]:
    """Combinations whose configs both engines translate for so many ranks."""
    numbers = random.Random(seed)
    while count:
        kind = numbers.choice([*KINDS])
        group = numbers.choice(KINDS[kind].parallel)
        kept = [numbers.choice(each) for each in KEPT]
        one, other = (
            _merged(
                {"training": {"micro_batch_size": MICRO_BATCH}, "parallel": numbers.choice(group)},
                *kept,
                *(numbers.choice(each) for each in (*FREE, *KINDS[kind].more)),
            )
            for _ in range(2)
        )
        if all(_is_valid(each, ranks) for each in (one, other)):
            yield Combination(kind, (one, other))
            count -= 1


def _merged(*sections: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in sections:
        found = merge(found, each)
    return found


def _is_valid(sections: Mapping[str, Any], ranks: int) -> bool:
    try:
        unishard.translate(unishard.load(sections), topology=unishard.Topology(ranks, ranks)).check(strict=False)
    except UnishardError:
        return False
    return True


def build(kind: str) -> nn.Module:
    """A model with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return KINDS[kind].model.build()


def windows(kind: str, cfg: Config, shares: int) -> list[list[list[dict[str, Any]]]]:
    """The micro-batches of each update of the whole run, by the turn, then by who shares them."""
    turns, found = 0, []
    for update in range(2 * UPDATES):
        length = cfg.training.accumulation_at(update)
        firsts = range(turns * shares * MICRO_BATCH, (turns + length) * shares * MICRO_BATCH, MICRO_BATCH)
        batches = [batch_of(KINDS[kind].model, first, MICRO_BATCH) for first in firsts]
        found.append([batches[at : at + shares] for at in range(0, len(batches), shares)])
        turns += length
    return found


def sharing(cfg: Config) -> int:
    """How many ranks read the same samples."""
    return cfg.parallel.sequence.size * cfg.parallel.tensor.size


def train(combination: Combination, folder: str) -> Curve | str:
    """Train both parts, or say why one is refused. Collective."""
    topology, recorder = unishard.Topology.from_environment(), Recorder()
    for number, sections in enumerate(combination.parts):
        cfg = unishard.load(sections)
        shares = topology.world_size // sharing(cfg)
        updates = windows(combination.kind, cfg, shares)[number * UPDATES :][:UPDATES]
        own = [turn[topology.rank // sharing(cfg)] for update in updates for turn in update]
        try:
            with unishard.prepare(build(combination.kind), cfg) as engine:
                if number:
                    engine.load(folder)
                for batch in engine.batches(own):
                    loss = engine(**batch).loss
                    engine.backward(loss)
                    recorder.record(engine.mean(loss), engine.step())
                engine.save(folder)
        except UnishardError as error:
            return f"{type(error).__name__}: {error}"
    return recorder.curve()


def plain(combination: Combination, ranks: int) -> Curve:
    """What plain torch does."""
    cfg = unishard.load(combination.parts[0])
    shares = ranks // sharing(cfg)
    updates = windows(combination.kind, cfg, shares)
    every = [[batch for turn in update for batch in turn] for update in updates]
    return oracle.train(build(combination.kind), every, cfg, world=shares)


def _work(combinations: Sequence[Combination], root: str) -> list[Curve | str]:
    return [train(each, str(Path(root, str(number)))) for number, each in enumerate(combinations)]


def judge(combinations: Sequence[Combination], ranks: int) -> Iterator[tuple[Combination, str, bool]]:
    """Train all in the same processes; yield what is said of each, and whether it is wrong."""
    with tempfile.TemporaryDirectory() as root:
        found = run_ranks(ranks, _work, combinations, root, timeout=120.0 * len(combinations))
    for combination, *answers in zip(combinations, *found, strict=True):
        answer = answers[0]
        if isinstance(answer, str) or any(each != answer for each in answers):
            yield combination, f"refused: {answer}", not all(isinstance(each, str) for each in answers)
            continue
        cfg = unishard.load(combination.parts[0])
        bound = TOLERANCES["fp32"] if cfg.precision.compute == "fp32" else _ROUNDED
        away = compare(answer, plain(combination, ranks))
        within = away.first_losses <= bound.first_losses and away.losses <= bound.losses and away.norms <= bound.norms
        yield combination, f"losses {away.losses:.1e}, norms {away.norms:.1e}", not within


def main() -> None:
    """Say of each combination what came of it; exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=16, help="combinations")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    wrong = 0
    for combination, said, is_wrong in judge([*drawn(given.seed, given.count, given.ranks)], given.ranks):
        wrong += is_wrong
        shown = combination if is_wrong or "refused" in said else combination.kind
        sys.stdout.write(f"{'WRONG' if is_wrong else 'right'}: {said}: {shown}\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
