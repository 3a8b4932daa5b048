"""Time and memory of saving, loading and exporting, compared with code written by hand for the same engine.

    python benchmarks/checkpoint.py                     # both engines, about 330 million parameters, 2 ranks, 4 GB a
    checkpoint python benchmarks/checkpoint.py --hidden 256 --rounds 1 --folder /scratch --json checkpoint.json

Both sides work on the same live model and optimizer in the same processes and take turns; printed are medians, and
their ratio. What is done by hand: on FSDP2 torch's `get_state_dict` with `dcp.save`, and `dcp.load` with
`set_state_dict`; on DeepSpeed its own `save_checkpoint`; for the export a gather of the full state dict on rank 0 and
`save_pretrained`. What a save costs at least shows a file of the same length on each rank that is written from one
piece of memory and synced. What is loaded comes from the disk, not from the kernel's cache of files. Memory is the
highest resident size of the worst rank above what it was before the call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import unishard
from unishard.checkpoint.disk import fsync
from unishard.config import Config
from unishard.testing import run_ranks
from unishard.testing.models import llama

GIB = 2**30


class Measured(NamedTuple):
    """One call."""

    seconds: float
    peak: float
    """Bytes above what the worst rank held before."""


class Line(NamedTuple):
    """One line of the table."""

    what: str
    ours: float
    """Seconds."""
    peer: float
    ratio: float
    ours_peak: float
    """Of what the rank holds of the state."""
    peer_peak: float


def sizes(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 64,
    }


def config(backend: str, strategy: str, **checkpoint: Any) -> Config:
    sections = {
        "backend": backend,
        "sharding": strategy,
        "precision": "bf16",
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "checkpoint": checkpoint,
    }
    return Config.model_validate(sections)


# -- measuring -------------------------------------------------------------------------------------


def resident(word: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {word}")


def measured(call: Callable[[], Any]) -> Measured:
    """Time and memory of a collective call, of the slowest and of the worst rank."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    os.sync()  # so that earlier writes do not slow this down
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    worst = torch.tensor([time.perf_counter() - start, float(resident("VmHWM") - before)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Measured(*worst.tolist())


@contextmanager
def folder(root: Path, name: str) -> Iterator[Path]:
    """A folder for one checkpoint, deleted after the measurement."""
    place = root / name
    try:
        yield place
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        dist.barrier()


def write_bytes(path: Path, number: int) -> None:
    """Write this many bytes to disk."""
    piece = bytes(4 * 2**20)
    path.mkdir(exist_ok=True)
    with (path / str(dist.get_rank())).open("wb", buffering=0) as file:
        for left in range(number, 0, -len(piece)):
            file.write(piece[:left])
        os.fsync(file.fileno())


def evict_from_cache(path: Path) -> None:
    """Drop a checkpoint from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def in_turns(rounds: int, *calls: Callable[[], Measured]) -> list[list[Measured]]:
    """Each call once in each round. Each has its turn to be the first, since the kernel takes much at once more slowly
    after a pause.
    """
    done: list[list[Measured]] = [[] for _ in calls]
    for turn in range(rounds):
        for place in range(len(calls)):
            which = (turn + place) % len(calls)
            done[which].append(calls[which]())
    return done


def line(what: str, ours: list[Measured], peer: list[Measured], state: int) -> Line:
    times = [statistics.median(each.seconds for each in side) for side in (ours, peer)]
    peaks = [max(each.peak for each in side) / state for side in (ours, peer)]
    return Line(what, times[0], times[1], times[0] / times[1], peaks[0], peaks[1])


# -- what is measured ------------------------------------------------------------------------------


def trained(cfg: Config, shape: dict[str, Any]) -> Any:
    """An engine with optimizer state."""
    engine = unishard.prepare(llama(**shape), cfg)
    tokens = (torch.arange(8) + dist.get_rank()).view(1, 8) % shape["vocab_size"]
    for batch in engine.batches([{"input_ids": tokens, "labels": tokens}]):
        engine.backward(engine(**batch).loss)
        engine.step()
    return engine


def fsdp(shape: dict[str, Any], root: str, rounds: int) -> list[Line]:
    place, cfg = Path(root), config("fsdp", "full_shard")
    with trained(cfg, shape) as engine:
        state = held(engine)

        def our_save() -> Measured:
            with folder(place, "ours") as path:
                return measured(lambda: engine.save(path))

        def their_save() -> Measured:
            with folder(place, "theirs") as path:
                return measured(lambda: dcp.save(by_hand(engine), checkpoint_id=path))

        def our_export() -> Measured:
            with folder(place, "export") as path:
                return measured(lambda: engine.export(path, dtype="bf16"))

        def their_export() -> Measured:
            with folder(place, "gathered") as path:
                return measured(lambda: save_pretrained(engine, path))

        def plain_write() -> Measured:
            with folder(place, "bytes") as path:
                return measured(lambda: write_bytes(path, state))

        ours, theirs, plain = in_turns(rounds, our_save, their_save, plain_write)
        lines = [line("fsdp full_shard: save / get_state_dict + dcp.save", ours, theirs, state)]
        lines.append(line("fsdp full_shard: save / as many bytes written and fsync", ours, plain, state))
        ours, theirs = in_turns(rounds, our_export, their_export)
        lines.append(line("fsdp full_shard: export / gather + save_pretrained", ours, theirs, state))
        with folder(place, "ours") as our_place, folder(place, "theirs") as their_place:
            checkpoint = engine.save(our_place)
            dcp.save(by_hand(engine), checkpoint_id=their_place)

            def our_load() -> Measured:
                evict_from_cache(checkpoint)
                return measured(lambda: engine.load(checkpoint, verify=None))

            def verified_load() -> Measured:
                evict_from_cache(checkpoint)
                return measured(lambda: engine.load(checkpoint, verify="files"))

            def their_load() -> Measured:
                evict_from_cache(their_place)
                return measured(lambda: load_by_hand(engine, their_place))

            unverified, verified, by_torch = in_turns(rounds, our_load, verified_load, their_load)
            lines.append(line("fsdp full_shard: load / dcp.load + set_state_dict", unverified, by_torch, state))
            lines.append(line("fsdp full_shard: load with checksums / the same", verified, by_torch, state))
    lines.append(background("fsdp", "full_shard", shape, place, rounds))
    return lines


def deepspeed(shape: dict[str, Any], root: str, rounds: int) -> list[Line]:
    place, lines = Path(root), []
    for strategy in ("shard_grad_op", "full_shard"):
        with trained(config("deepspeed", strategy), shape) as engine:
            state = held(engine)

            def our_save(engine: Any = engine) -> Measured:
                with folder(place, "ours") as path:
                    return measured(lambda: engine.save(path))

            def their_save(engine: Any = engine) -> Measured:
                with folder(place, "theirs") as path, past_the_engine(engine):
                    return measured(lambda: engine._adapter._engine.save_checkpoint(str(path)))

            def their_save_on_disk(engine: Any = engine) -> Measured:
                def both() -> None:
                    engine._adapter._engine.save_checkpoint(str(path))
                    for file in sorted(each for each in path.rglob("*") if each.is_file())[
                        dist.get_rank() :: dist.get_world_size()
                    ]:
                        fsync(file)

                with folder(place, "theirs") as path, past_the_engine(engine):
                    return measured(both)

            def our_load(engine: Any = engine) -> Measured:
                with folder(place, "ours") as path:
                    checkpoint = engine.save(path)
                    evict_from_cache(checkpoint)
                    return measured(lambda: engine.load(checkpoint, verify=None))

            def plain_write(state: int = state) -> Measured:
                with folder(place, "bytes") as path:
                    return measured(lambda: write_bytes(path, state))

            ours, theirs, on_disk, plain, load = in_turns(
                rounds, our_save, their_save, their_save_on_disk, plain_write, our_load
            )
            lines.append(
                line(
                    f"deepspeed {strategy}: save / save_checkpoint, which is not on the disk then", ours, theirs, state
                )
            )
            lines.append(
                line(f"deepspeed {strategy}: save / save_checkpoint and fsync of its files", ours, on_disk, state)
            )
            lines.append(line(f"deepspeed {strategy}: save / as many bytes written and fsync", ours, plain, state))
            lines.append(line(f"deepspeed {strategy}: load / save", load, ours, state))
    lines.append(background("deepspeed", "full_shard", shape, place, rounds))
    return lines


def background(backend: str, strategy: str, shape: dict[str, Any], place: Path, rounds: int) -> Line:
    """How long an asynchronous save blocks training, compared with waiting for it."""
    with trained(config(backend, strategy, async_save=True), shape) as engine:

        def blocking() -> Measured:
            with folder(place, "later") as path:
                result = measured(lambda: engine.save(path))
                engine.wait()
                return result

        def complete() -> Measured:
            def both() -> None:
                engine.save(path)
                engine.wait()

            with folder(place, "now") as path:
                return measured(both)

        returned, written = in_turns(rounds, blocking, complete)
        return line(
            f"{backend} {strategy}: async_save, until it returns / until it is there", returned, written, held(engine)
        )


def held(engine: Any) -> int:
    """Bytes of masters and optimizer state on this rank."""
    return 3 * 4 * engine.weights.placement().master_numel


def by_hand(engine: Any) -> dict[str, Any]:
    with past_the_engine(engine):
        model, optimizer = get_state_dict(engine.module, engine._adapter.updates.optimizer)
    return {"model": model, "optim": optimizer}


@contextmanager
def past_the_engine(engine: Any) -> Iterator[None]:
    """A block in which the engines' own functions may read and write the module and the optimizer, which are refused
    otherwise.
    """
    optimizer = engine._adapter.updates.torch_optimizer
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_pre_hooks)
    refusing = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    with engine._guarded.lifted():
        yield
    for each, before in zip(hooks, refusing, strict=True):
        each.update(before)


def load_by_hand(engine: Any, path: Path) -> None:
    state = by_hand(engine)
    dcp.load(state, checkpoint_id=path)
    with past_the_engine(engine):
        set_state_dict(
            engine.module,
            engine._adapter.updates.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def save_pretrained(engine: Any, path: Path) -> None:
    with past_the_engine(engine):
        state = get_model_state_dict(engine.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        engine.module.save_pretrained(path, state_dict={name: value.bfloat16() for name, value in state.items()})
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["fsdp", "deepspeed"])
    parser.add_argument("--folder", help="where the checkpoints are written; left out, the temporary directory")
    parser.add_argument("--json", help="also write the lines to this file")
    arguments = parser.parse_args()
    shape = sizes(arguments.hidden, arguments.layers)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in llama(**shape).parameters())
    print(
        f"{numel / 1e6:.0f} million parameters, {12 * numel / GIB:.1f} GiB of fp32 state, {arguments.ranks} ranks, "
        f"medians of {arguments.rounds}"
    )
    print(f"{'':75} {'ours':>8} {'by hand':>8} {'ratio':>6}  extra memory of the state: ours, by hand")
    lines = []
    for work in (fsdp, deepspeed):
        if arguments.backend in (None, work.__name__):
            with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.folder) as root:
                for each in run_ranks(arguments.ranks, work, shape, root, arguments.rounds, timeout=3600)[0]:
                    lines.append(each)
                    print(
                        f"{each.what:75} {each.ours:7.2f}s {each.peer:7.2f}s {each.ratio:6.2f}  {each.ours_peak:6.1%} "
                        f"{each.peer_peak:6.1%}"
                    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([each._asdict() for each in lines], indent=2) + "\n")


if __name__ == "__main__":
    main()
