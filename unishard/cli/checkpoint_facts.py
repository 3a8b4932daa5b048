"""Format a manifest for `unishard checkpoint list` and `inspect`. Needs no torch."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from unishard.checkpoint.manifest import Manifest, TensorFacts
from unishard.checkpoint.tensor_names import AVERAGES, BUFFERS, EXTRA_STATE, RANDOM, STATE, optimizer_part, parameter_of
from unishard.cli.text_report import value_of
from unishard.config.describe import count_of


class TensorKind(NamedTuple):
    """All tensors of one kind; tied tensors count once."""

    name: str
    tensors: int
    numel: int
    bytes: int
    dtypes: list[str]
    norm: float | None
    """Their joint L2 norm, if the manifest has it."""


def size(count: int) -> str:
    """Format a number of bytes with three digits: `1.27 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def size_of(folder: Path) -> int:
    """Total bytes of the files in a directory; another process may be deleting them."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            total += 0 if path.is_dir() else path.lstat().st_size
    return total


def bytes_of(facts: TensorFacts) -> int:
    """Bytes of a tensor. A dtype's name contains its bits, except for bool."""
    bits = re.search(r"\d+", facts.dtype)
    return math.prod(facts.shape) * (int(bits[0]) // 8 if bits else 1)


def local(written: str) -> str:
    """The time of writing in this machine's time zone."""
    try:
        return datetime.fromisoformat(written).astimezone().isoformat(sep=" ", timespec="seconds")
    except ValueError:
        return written


def place_of(manifest: Manifest) -> tuple[str, str]:
    """Backend and strategy; empty for a converted checkpoint."""
    config = manifest.config or {}
    sharding = config.get("sharding")
    strategy = sharding.get("strategy") if isinstance(sharding, dict) else sharding
    return str(config.get("backend") or ""), str(strategy or "")


def facts_of(shown: str, bytes_of_files: int, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield all facts that are not in a table."""
    backend, strategy = place_of(manifest)
    model, optimizer, schedule, scale = manifest.model, manifest.optimizer, manifest.schedule, manifest.loss_scale
    yield "checkpoint", shown
    yield "step", str(manifest.step)
    if manifest.run:
        yield (
            "run",
            manifest.run if manifest.commit is None else f"{manifest.run}, commit {manifest.commit} of its directory",
        )
    if manifest.metric is not None:
        yield "metric", value_of(manifest.metric)
    yield "written", local(manifest.written)
    yield "format", f"{manifest.format} {manifest.version}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield "ranks", str(manifest.world_size)
    yield "backend", f"{backend}, {strategy}" if backend else "unknown (converted checkpoint)"
    yield "model", f"{model.class_name}, {count_of(model.numel, 'parameter')}, fingerprint {model.fingerprint}"
    for name, count in (
        ("ties", len(manifest.ties)),
        ("frozen", len(manifest.frozen)),
        ("buffers", len(manifest.buffers)),
    ):
        if count:
            yield name, str(count)
    groups = len(optimizer.groups) if optimizer else 0
    yield "optimizer", f"{optimizer.class_name}, {count_of(groups, 'group')}" if optimizer else "none"
    if schedule:
        yield "schedule", count_of(schedule.updates, "update")
    if scale:
        yield "loss scale", f"{scale.value:g}, {count_of(scale.made, 'update')} since it changed"
    if manifest.data:
        yield "data", f"of {count_of(len(manifest.data), 'rank')}; the first: {value_of(manifest.data[0])}"
    yield "state", "none" if manifest.state is None else value_of(manifest.state)
    yield "size", f"{size(bytes_of_files)} in {count_of(len(manifest.files) + 1, 'file')}"


def groups_of(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Each parameter group: index, number of parameters, learning rate, other options."""
    groups = manifest.optimizer.groups if manifest.optimizer else []
    return [
        (
            str(at),
            str(len(group.names)),
            _rate(group.options.get("lr", "")),
            ", ".join(
                f"{name}={value_of(value)}"
                for name, value in group.options.items()
                if name != "lr" and value is not None
            ),
        )
        for at, group in enumerate(groups)
    ]


def _rate(rate: Any) -> str:
    return f"{rate:.6g}" if isinstance(rate, float) else str(rate)


def kinds_of(manifest: Manifest) -> list[TensorKind]:
    """Count the tensors by kind."""
    kinds: dict[str, list[TensorFacts]] = defaultdict(list)
    for name, facts in manifest.tensors.items():
        if parameter_of(name) not in manifest.ties:
            kinds[_kind(name, manifest)].append(facts)
    return [
        TensorKind(
            name,
            len(facts),
            sum(math.prod(tensor.shape) for tensor in facts),
            sum(map(bytes_of, facts)),
            sorted({tensor.dtype for tensor in facts}),
            manifest.norms.get(name),
        )
        for name, facts in kinds.items()
    ]


def _kind(name: str, manifest: Manifest) -> str:
    if (parameter := parameter_of(name)) is not None:
        return (
            "buffers" if parameter in manifest.buffers else "frozen" if parameter in manifest.frozen else "parameters"
        )
    if (part := optimizer_part(name)) is not None:
        return part[1]
    kinds = {
        AVERAGES: "moving averages",
        BUFFERS: "buffers of ranks",
        RANDOM: "random numbers",
        STATE: "state",
        EXTRA_STATE: "extra state",
    }
    return next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), "other")
