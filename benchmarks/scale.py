"""What grows with the number of ranks: plays N ranks in this process, with fake process groups and recorded metadata.

    python benchmarks/scale.py --ranks 8 64 1024 4096 8192 16384 --json scale.json --picture docs/scale.svg

The model is a Llama of 70 billion parameters with AdamW, each tensor sharded over all ranks by rows, as on FSDP2. Times
are seconds of CPU of one process. Where a number of ranks means more chunks than `--chunks`, only some of the model's
layers are played, and each of the others is taken to add as much.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dev.pages.markdown import table
from unishard.checkpoint import tensor_reader, writing
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Planning, RankResult
from unishard.checkpoint.saving import without_collections
from unishard.distributed.agreement import agree
from unishard.distributed.lazy_shards import LazyShard
from unishard.failures import digest_exchange
from unishard.failures.deadlocks import Diagnosis
from unishard.failures.monitor_server import MonitorServer, _Link

HIDDEN, INNER, KEYS, LAYERS, WORDS = 8192, 28672, 1024, 80, 128256
LAYER = {
    **dict.fromkeys(("q", "o"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("k", "v"), (KEYS, HIDDEN)),
    **dict.fromkeys(("gate", "up"), (INNER, HIDDEN)),
    "down": (HIDDEN, INNER),
    "norm1": (HIDDEN,),
    "norm2": (HIDDEN,),
}
ENDS = {"embed": (WORDS, HIDDEN), "head": (WORDS, HIDDEN), "norm": (HIDDEN,)}
COLLECTIVES = ("all_reduce", "all_gather_object", "gather_object", "broadcast_object_list", "broadcast")
ROUNDS = 20
CONFIG = {f"section.field{number}": "x" * 200 for number in range(150)}

Row = dict[str, float]


@cache
def parameters() -> dict[str, tuple[int, ...]]:
    """Names and shapes."""
    layers = {f"layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in LAYER.items()}
    return layers | {f"{name}.weight": shape for name, shape in ENDS.items()}


def cpu(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of CPU, and the result."""
    began = time.process_time()
    result = act()
    return time.process_time() - began, result


# -- prepare and the watch -------------------------------------------------------------------------


def agreement(world: int) -> Row:
    """What one rank sends and receives in a check of `prepare` that all ranks pass."""
    calls: list[int] = []
    kept = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **more: Any) -> Any:
            if name == "all_gather_object":
                first[:] = [rest[0]] * world
            calls.append(world * len(pickle.dumps(rest[0])) if name == "all_gather_object" else first.nbytes)
            return SimpleNamespace(wait=lambda: None)  # of a call with async_op

        return call

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        for name in COLLECTIVES:
            setattr(dist, name, counting(name))
        agree(CONFIG, "configs")
    finally:
        for name, call in kept.items():
            setattr(dist, name, call)
        dist.destroy_process_group()
    return {"agree: collectives": len(calls), "agree: bytes a rank": sum(calls)}


class Counted:
    """A connection that counts."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0

    def sendall(self, data: bytes) -> None:
        """Count a message."""
        self.bytes += len(data)
        self.messages += 1


def watch(world: int) -> Row:
    """What the monitor on rank 0 spends and sends: when the ranks arrive, and when all of them stand still."""
    examined: list[int] = []

    def detect(statuses: Any) -> Diagnosis:
        examined.append(len(statuses))
        return Diagnosis()

    server, links = MonitorServer(world, "token", detect, lambda rank: False), [_Link(Counted()) for _ in range(world)]  # type: ignore[arg-type]
    for rank, link in enumerate(links):
        server._handle(link, {"token": "token", "rank": rank, "size": world})
    said = {"kind": "collect", "key": "arrived", "value": "", "purpose": "", "seconds": None, "patience": None}
    before = sum(link.socket.bytes for link in links)  # type: ignore[attr-defined]
    collected, _ = cpu(lambda: [server._handle(link, said) for link in links])
    sent = sum(link.socket.bytes for link in links) - before  # type: ignore[attr-defined]
    still, _ = cpu(
        lambda: [server._handle(link, {"kind": "status", "status": "waits"}) for _ in range(2) for link in links]
    )
    return {
        "arrive: server, s": collected,
        "arrive: bytes of the monitor": sent,
        "late rank: server, s": still,
        "late rank: judgements": len(examined),
        "desync: messages a rank": sum(map(len, digest_exchange._rounds(world))),
    }


# -- checkpoints -----------------------------------------------------------------------------------


def shards(rank: int, world: int, names: Iterable[str]) -> dict[str, LazyShard]:
    """What one rank holds: rows of each parameter, its two moments, and the step count that all ranks hold."""
    shapes, held = parameters(), {}
    for name in names:
        shape = torch.Size(shapes[name])
        row, each = shape.numel() // shape[0], -(-shape[0] // world)
        begin, end = (min(at * each, shape[0]) * row for at in (rank, rank + 1))
        for key in (f"model.{name}", f"optim.state.{name}.exp_avg", f"optim.state.{name}.exp_avg_sq"):
            held[key] = LazyShard(shape, torch.float32, begin, end, lambda begin, end: torch.empty(0))
        held[f"optim.state.{name}.step"] = LazyShard(
            torch.Size(()), torch.float32, 0, 1, lambda begin, end: torch.empty(0)
        )
    return held


def states(rank: int) -> dict[str, LazyShard]:
    """Random states of a rank, which are planned in each save."""
    sizes = {"torch": 5056, "python": 6700 + rank % 50, "cuda": 16}
    nothing = torch.empty(0)
    return {
        f"rng.rank{rank:05d}.{kind}": LazyShard(torch.Size((size,)), torch.uint8, 0, size, lambda begin, end: nothing)
        for kind, size in sizes.items()
    }


def local_plans(world: int, names: list[str], cache: PlanCache) -> tuple[writing._Planner, list[bytes]]:
    """The planner of the last rank, and what each rank sends to rank 0 before a save."""
    plans = []
    for rank in range(world):
        planner = writing._Planner(shards(rank, world, names) | states(rank), cache)
        plans.append(pickle.dumps(planner.create_local_plan()))
    return planner, plans


def local_results(world: int, names: list[str], planned: Planning) -> list[bytes]:
    """What each rank sends to rank 0 after it has written."""
    records = [plan._records for plan in planned.assignments]
    each = sum(torch.Size(parameters()[name]).numel() for name in names) * 12 // sum(records[0]) + 1000
    results = []
    for rank in range(world):
        lengths = [np.full(count[rank], each) for count in records]
        tensors = [len(plan.numbers[rank]) for plan in planned.assignments]
        sums = [[np.zeros(count, kind) for count in tensors] for kind in (np.uint64, np.float64)]
        results.append(pickle.dumps([RankResult(f"__{rank}_0.distcp", sum(lengths[0]), 0, lengths, *sums)]))
    return results


def states_again(world: int, names: list[str]) -> list[bytes]:
    """What each rank sends to rank 0 before a save for which the last plan holds."""
    sent = []
    for rank in range(world):
        again = writing._Planner((shards(0, world, names) if rank == 0 else {}) | states(rank), PlanCache())
        again.reuses = True
        sent.append(pickle.dumps(again.create_local_plan()))
    return sent


def planned(world: int, names: list[str], folder: Path) -> tuple[Row, int]:
    """What rank 0 spends on the plan and the index of a save, and the number of chunks."""
    planner, plans = local_plans(world, names, cache := PlanCache())
    gathering, received = cpu(lambda: [pickle.loads(plan) for plan in plans])
    planning, (final, metadata) = cpu(lambda: planner.create_global_plan(received))
    scattering, sent = cpu(lambda: [pickle.dumps(plan) for plan in final])
    assert isinstance(cache.planning, Planning)
    results = local_results(world, names, cache.planning)
    folder.mkdir()
    reading, everyone = cpu(lambda: [pickle.loads(result) for result in results])
    writer = writing._Writer(folder, {}, lambda written: None, planner)
    writing_index, _ = cpu(lambda: writer.finish(metadata, everyone))
    second = states_again(world, names)
    planning_again, _ = cpu(lambda: planner.create_global_plan([pickle.loads(plan) for plan in second]))
    row = {
        "save: gather plans, s": gathering,
        "save: plan, s": planning,
        "save: send plans, s": scattering,
        "save: gather results, s": reading,
        "save: index, s": writing_index,
        "save: index, bytes": float(sum(path.stat().st_size for path in folder.iterdir())),
        "save: bytes of plans to and from rank 0": float(sum(map(len, plans)) + sum(map(len, sent))),
        "second save: plan, s": planning_again,
        "second save: bytes of plans to and from rank 0": float(sum(map(len, second))),
    }
    return row, int(sum(cache.planning.assignments[0]._records))


def located(world: int, names: list[str], folder: Path) -> Row:
    """What each rank spends until it knows where its shards lie."""
    mine = [(name, shard) for name, shard in shards(world // 3, world, names).items() if shard.end > shard.start]

    @without_collections()
    def find() -> None:
        tensors = tensor_reader.Tensors(folder)
        assert all(tensors._chunks(name, shard.start, shard.end) for name, shard in mine)

    seconds, _ = cpu(find)
    return {
        "load: find shards, s": seconds,
        "load: bytes of index a rank": float((folder / ".metadata").stat().st_size),
    }


def checkpoint(world: int, most: int) -> Row:
    """A save and a load, of so many layers as give at most so many chunks; each of the others is taken to add the
    same.
    """
    names = list(parameters())
    layers = max(1, min(LAYERS, most // (4 * world * len(LAYER))))
    played = names if layers == LAYERS else names[: layers * len(LAYER)]
    row = saved_and_found(world, played)
    if len(played) < len(names):
        fixed = saved_and_found(world, ["layers.0.norm1.weight"])  # what does not grow with the number of tensors
        row = {
            name: fixed[name] + max(0.0, value - fixed[name]) * len(names) / len(played) for name, value in row.items()
        }
    return {"chunks": round(row.pop("chunks")), "played": len(played) / len(names)} | row


def saved_and_found(world: int, names: list[str]) -> Row:
    """A save and a load of some tensors."""
    with tempfile.TemporaryDirectory() as place:
        row, chunks = planned(world, names, Path(place) / "saved")
        return row | located(world, names, Path(place) / "saved") | {"chunks": float(chunks)}


# -- output ----------------------------------------------------------------------------------------


def written(rows: dict[int, Row]) -> str:
    """Markdown: a line for each quantity, a column for each number of ranks."""
    lines = ((name, *(_text(row[name]) for row in rows.values())) for name in next(iter(rows.values())))
    return table(("", *(f"{world:,} ranks" for world in rows)), lines)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def picture(rows: dict[str, dict[int, Row]], path: Path) -> None:
    """What is counted, by ranks, now and before. No times: those depend on what else the machine does."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unishard"
    from matplotlib import pyplot

    shown = {
        "save: bytes of plans to and from rank 0": "save: bytes of plans to and from rank 0",
        "every further save: bytes of plans": "second save: bytes of plans to and from rank 0",
        "load: bytes of index that a rank reads": "load: bytes of index a rank",
        "start: bytes that rank 0 sends": "arrive: bytes of the monitor",
        "a check of prepare: bytes a rank": "agree: bytes a rank",
        "a late rank: judgements": "late rank: judgements",
    }
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for color, (title, name) in enumerate(shown.items()):
        for runs, style in zip(rows.values(), ("-", "--"), strict=False):
            label = title if style == "-" else None
            axes.plot([*runs], [row[name] for row in runs.values()], style, color=f"C{color}", marker=".", label=label)
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_title("70 billion parameters; dashed: before", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096, 8192, 16384])
    parser.add_argument("--chunks", type=int, default=1_200_000, help="chunks of a checkpoint that are played")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--before", type=Path, help="numbers of an earlier version, for the picture")
    parser.add_argument("--picture", type=Path, help="write an SVG here")
    arguments = parser.parse_args()
    rows = {world: agreement(world) | watch(world) | checkpoint(world, arguments.chunks) for world in arguments.ranks}
    print(written(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.picture:
        runs = {"after": rows}
        if arguments.before:
            runs["before"] = {int(world): row for world, row in json.loads(arguments.before.read_text()).items()}
        picture(runs, arguments.picture)


if __name__ == "__main__":
    main()
