"""Moves a run from DeepSpeed to FSDP and back, and writes docs/moving.md: `make matrix`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unishard
from dev.pages.markdown import table
from dev.ranks.judging import deviation
from unishard.config import Config
from unishard.testing import run_ranks
from unishard.testing.models import llama

RANKS, UPDATES = 2, 10
"""Processes, and updates between two moves."""
PRECISIONS = ("fp32", "bf16")
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
STAGES = (("deepspeed", "full_shard"), ("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"))
"""Engine and strategy before the first move, after it, and after the second."""


class Stage(NamedTuple):
    """What a run did on one engine."""

    losses: list[float]
    norms: list[float]
    """Of gradients, before clipping."""
    load: float
    """Seconds of `engine.load`; 0 at the beginning."""
    save: float
    """Seconds of `engine.save`."""
    saved: int
    """Bytes of the checkpoint."""


class Move(NamedTuple):
    """A run that moved, and the largest relative deviation of each stage from one that did not."""

    parameters: int
    stages: list[Stage]
    losses: list[float]
    norms: list[float]


def measure(precision: str, sizes: Mapping[str, Any] = SIZES, updates: int = UPDATES) -> Move:
    """Train both runs."""
    stages = []
    with tempfile.TemporaryDirectory() as root:
        for number, (backend, strategy) in enumerate(STAGES):
            begin, end = number * updates, (number + 1) * updates
            stages.append(_train(backend, strategy, precision, sizes, begin, end, root))
    stayed = _train(*STAGES[0], precision, sizes, 0, len(STAGES) * updates, "")
    parameters = sum(each.numel() for each in llama(**sizes).parameters())
    parts = [slice(number * updates, (number + 1) * updates) for number in range(len(STAGES))]
    return Move(
        parameters,
        stages,
        [deviation(stage.losses, stayed.losses[part]) for stage, part in zip(stages, parts, strict=True)],
        [deviation(stage.norms, stayed.norms[part]) for stage, part in zip(stages, parts, strict=True)],
    )


def _train(
    backend: str, strategy: str, precision: str, sizes: Mapping[str, Any], begin: int, end: int, root: str
) -> Stage:
    config = {
        "backend": backend,
        "sharding": strategy,
        "precision": precision,
        "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        "scheduler": {"name": "cosine", "warmup_steps": 5, "total_steps": 200},
        "checkpoint": {"dir": root} if root else {},
    }
    return Stage(*run_ranks(RANKS, _stage, config, dict(sizes), begin, end, timeout=3600)[0])


def _stage(config: dict[str, Any], sizes: dict[str, Any], begin: int, end: int) -> tuple[Any, ...]:
    """Updates `begin` to `end`, which load what is there and save what they have done."""
    cfg, root = Config.model_validate(config), config["checkpoint"].get("dir")
    with unishard.prepare(llama(seed=begin, **sizes), cfg) as engine:
        load = _seconds(lambda: engine.load("latest")) if begin else 0.0
        losses, norms = [], []
        for update in range(begin, end):
            loss_of_window = 0.0
            for turn in range(cfg.training.gradient_accumulation_steps):
                loss = engine(**_batch(sizes, update, turn, engine.rank)).loss
                engine.backward(loss)
                loss_of_window += engine.mean(loss) / cfg.training.gradient_accumulation_steps
                step = engine.step()
            losses.append(loss_of_window)
            norms.append(step.grad_norm)
        save = _seconds(engine.save) if root else 0.0
    saved = sum(file.stat().st_size for file in Path(root).glob(f"*{end:08d}/**/*") if file.is_file()) if root else 0
    return losses, norms, load, save, saved


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _batch(sizes: Mapping[str, Any], update: int, turn: int, rank: int) -> dict[str, torch.Tensor]:
    """Random tokens: their loss stays far from 0, where relative deviations would say little."""
    generator = torch.Generator().manual_seed(10_000 * update + 100 * turn + rank)
    tokens = torch.randint(sizes["vocab_size"], (2, 32), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def page(moves: Mapping[str, Move]) -> str:
    """The page in Markdown, with a move by the precision of its run."""
    rows = (row for precision, move in moves.items() for row in _rows(precision, move))
    columns = ("precision", "on", "losses", "norms", "load", "save", "checkpoint")
    return "\n".join([_introduction(moves), table(columns, rows), "", _ELSEWHERE])


def _introduction(moves: Mapping[str, Move]) -> str:
    torch_version, deepspeed = (version(package).partition("+")[0] for package in ("torch", "deepspeed"))
    millions = round(next(iter(moves.values())).parameters / 1e6, 1)
    return f"""# From DeepSpeed to FSDP and back

One run, begun on DeepSpeed, continued on FSDP2, and finished on DeepSpeed under another strategy. The config changes in one or two
lines; script, learning rate, data and checkpoints do not:

```text
unishard launch train.yaml --processes-per-node 8 train.py
unishard launch train.yaml --processes-per-node 8 --set backend=fsdp train.py
unishard launch train.yaml --processes-per-node 8 --set sharding=zero2 train.py
```

`checkpoint: {{dir: runs, on_existing: resume}}` in the config resumes each time. Run by
`make matrix`: a Llama of {millions} million parameters, {RANKS} ranks, {UPDATES} updates between two moves,
accumulation, clipping and a cosine schedule; torch {torch_version}, DeepSpeed {deepspeed}, CPU, gloo. Each stage is compared with a
run that stayed on {STAGES[0][0]} {STAGES[0][1]}: the largest relative deviations of its losses and gradient norms.
"""


def _rows(precision: str, move: Move) -> Iterator[tuple[str, ...]]:
    for number, (on, stage) in enumerate(zip(STAGES, move.stages, strict=True)):
        apart = (f"{move.losses[number]:.0e}", f"{move.norms[number]:.0e}")
        load = f"{stage.load:.2f} s" if number else ""
        yield precision, " ".join(on), *apart, load, f"{stage.save:.2f} s", f"{stage.saved / 2**20:.0f} MiB"


_ELSEWHERE = """A run of your own script on DeepSpeed begins here too: `unishard translate ds_config.json --to unishard` writes the config
([from-deepspeed.md](from-deepspeed.md)), and `unishard checkpoint convert` reads the checkpoint that DeepSpeed has
written, at any stage and number of ranks, and writes one for DeepSpeed again ([checkpoints.md](checkpoints.md)).

## What goes wrong elsewhere

What users met who changed the engine in another framework, and what is the same here on both.

| | Elsewhere | Here |
|---|---|---|
| master weights | A model that was loaded in bf16 is trained in bf16 by FSDP and with fp32 masters by DeepSpeed: it converged on one of them ([accelerate 2624](https://github.com/huggingface/accelerate/issues/2624), [trl 1224](https://github.com/huggingface/trl/issues/1224)) | `precision.master`, fp32 unless you say otherwise; `prepare` compares what the engine holds with it |
| clipping | `clip_grad_norm_` in the loop does nothing under DeepSpeed, whose own value or default counts ([accelerate 3807](https://github.com/huggingface/accelerate/issues/3807), [DeepSpeed 7220](https://github.com/deepspeedai/DeepSpeed/issues/7220)); its default went from none to 1.0 ([DeepSpeed 8068](https://github.com/deepspeedai/DeepSpeed/pull/8068)) | `training.gradient_clipping`, by the norm over all ranks; `step().grad_norm` is that norm |
| accumulation | the loss is divided by the accumulation steps twice, or never ([accelerate 3533](https://github.com/huggingface/accelerate/issues/3533), [transformers 35808](https://github.com/huggingface/transformers/pull/35808)) | `engine.backward` takes the mean loss of the micro-batch and divides, on each engine alike |
| reduction | gradients are reduced and added up in bf16 on one engine and in fp32 on the other ([DeepSpeed 2768](https://github.com/deepspeedai/DeepSpeed/issues/2768), [DeepSpeed 1835](https://github.com/deepspeedai/DeepSpeed/issues/1835)) | `precision.reduce` and `precision.accumulate`, fp32 unless you say otherwise |
| schedule | steps once for each rank, or ends early ([accelerate 1382](https://github.com/huggingface/accelerate/issues/1382), [accelerate 2708](https://github.com/huggingface/accelerate/issues/2708)) | counts updates, and goes on from the checkpoint |
| norms in the log | of one rank's shard, or of another scale at another stage ([pytorch 88621](https://github.com/pytorch/pytorch/issues/88621), [DeepSpeed 4298](https://github.com/deepspeedai/DeepSpeed/issues/4298)) | the norm before clipping, of the undivided model |
| checkpoints | each engine reads its own, often only at the same number of ranks ([DeepSpeed 3810](https://github.com/deepspeedai/DeepSpeed/issues/3810), [ms-swift 3989](https://github.com/modelscope/ms-swift/issues/3989)) | one format for both, at any number of ranks, strategy and engine ([resuming.md](resuming.md)) |
"""


def main(arguments: Sequence[str]) -> None:
    """Write the page to a path."""
    parser = argparse.ArgumentParser(prog="python -m dev.moving", description="Move a run and write the page.")
    parser.add_argument("path", type=Path)
    path: Path = parser.parse_args(arguments).path
    path.write_text(page({precision: measure(precision) for precision in PRECISIONS}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
