"""Counts the Python function calls of one update, unishard's own and in all, and how many a block of the model adds.

    python benchmarks/calls.py                       # both engines, no_shard, shard_grad_op and full_shard, 2 ranks
    python benchmarks/calls.py --backend fsdp --strategy full_shard --top 20

A count is the same on every machine, so a test holds it (tests/ranks/test_calls.py), which no time could be. What grows
with the blocks walks the model: that should be the engine and the optimizer, and of unishard only what the gradient
norm takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import unishard
from unishard.testing import run_ranks
from unishard.testing.models import Mlp

STRATEGIES = ("no_shard", "shard_grad_op", "full_shard")
BLOCKS = (2, 6)
WARM_UP = 12
"""Updates before the one that is counted: past the first, in which more is checked, and not a tenth."""
_ELSEWHERE = ("unishard_fsdp/ddp/averaging.py", "<lambda>")
"""Runs when a reduction is through, in this thread or in one of the process group's."""
_PACKAGES = tuple(Path(*import_module(name).__path__) for name in ("unishard", "unishard_fsdp", "unishard_deepspeed"))


class Calls(NamedTuple):
    """Of one update."""

    own: Counter[str]
    """Of functions of unishard, by `file:function`."""
    others: Counter[str]
    """Of all other functions."""

    @property
    def everything(self) -> int:
        """The number of all calls."""
        return self.own.total() + self.others.total()


def count(backend: str, strategy: str, blocks: int, accumulation: int = 1) -> Calls:
    """Forward, backward and step of one window, and the fetch of its batches. Collective."""
    cfg = unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": strategy,
            "training": {"micro_batch_size": 2, "gradient_clipping": 1.0, "gradient_accumulation_steps": accumulation},
        }
    )
    generator = torch.Generator().manual_seed(unishard.Topology.from_environment().rank)
    batch = {"x": torch.randn(2, 13, generator=generator), "labels": torch.randint(0, 11, (2,), generator=generator)}
    with unishard.prepare(Mlp(blocks=blocks), cfg) as engine:
        loop = engine.batches([batch] * ((WARM_UP + 2) * accumulation))

        def update() -> None:
            for _ in range(accumulation):
                loss = engine(**next(loop)).loss
                engine.backward(loss)
                engine.step()

        for _ in range(WARM_UP):
            update()
        return profiled(update)


def profiled(run: Callable[[], object]) -> Calls:
    found = Calls(Counter(), Counter())
    sys.setprofile(recorder(found))
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def recorder(calls: Calls) -> Callable[[FrameType, str, Any], None]:
    """A profile function that counts calls."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            place = own_place(code.co_filename)
            if place and (place, code.co_name) != _ELSEWHERE:
                calls.own[f"{place}:{code.co_name}"] += 1
            else:
                calls.others[f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}"] += 1

    return note


def own_place(path: str) -> str:
    """A file's path from its package on; empty outside unishard. Its tests and demo models are the user's."""
    # By the folders of the packages: that of a checkout may have the same name as one of them.
    package = next((each for each in _PACKAGES if path.startswith(f"{each}/")), None)
    if package is None or path.startswith(f"{package}/testing/"):
        return ""
    return str(Path(path).relative_to(package.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("fsdp", "deepspeed"), action="append", help="default: both")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="default: all three")
    parser.add_argument(
        "--top", type=int, default=0, help="also list the functions that are called most, and those that a block adds"
    )
    given = parser.parse_args()
    print(
        f"{'backend':10} {'strategy':14} {'own calls':>9} {'a block adds':>13} {'all calls':>10} {'a block adds':>13}"
    )
    few, many = BLOCKS
    for backend in given.backend or ("fsdp", "deepspeed"):
        for strategy in given.strategy or STRATEGIES:
            small, large = (run_ranks(2, count, backend, strategy, blocks, timeout=300)[0] for blocks in BLOCKS)
            own, larger = (sum(each.own.values()) for each in (small, large))
            print(
                f"{backend:10} {strategy:14} {own:9} {(larger - own) / (many - few):13g} "
                f"{small.everything:10} {(large.everything - small.everything) / (many - few):13g}",
                flush=True,
            )
            for more, less in ((large.own, small.own), (large.others, small.others)):
                for name, number in more.most_common(given.top):
                    print(f"    {number:5} {name} (+{(number - less[name]) / (many - few):g} a block)")


if __name__ == "__main__":
    main()
