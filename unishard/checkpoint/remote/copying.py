"""Copies one checkpoint or export to a store: each node the files of its ranks, rank 0 the manifest once all are there.

Copying is not collective: it runs in background threads. What nodes know of each other is what is in the store.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.files import read_bytes
from unishard.checkpoint.remote.copies import name_of
from unishard.checkpoint.remote.store import Store
from unishard.distributed.on_ranks import Ranks
from unishard.errors import CheckpointError

Tell = Callable[[int, int], None]
"""Gets how many bytes are sent, and of how many."""
_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_POLL = 2.0
_MINUTE = 60.0


class Node(NamedTuple):
    """One machine among those of a run."""

    ranks: Sequence[int]
    """The ranks on it, ascending."""
    world: int

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is on it."""
        return 0 in self.ranks

    def copies(self, file: str) -> bool:
        """Whether it copies a file: those of its ranks, and where rank 0 is, what all ranks share."""
        match = _RANK.fullmatch(file)
        return (int(match[1]) % self.world if match else 0) in self.ranks


def node_of(ranks: Ranks) -> Node:
    """The node of this rank. Collective."""
    hosts = ranks.gather(socket.gethostname())
    return Node([rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]], ranks.world)


def copy_checkpoint(
    store: Store,
    folder: Path,
    node: Node,
    confirm: Callable[[], None],
    stopped: threading.Event,
    tell: Tell = lambda sent, total: None,
) -> str | None:
    """Copy this node's part of a checkpoint; on the node of rank 0, complete it.

    Args:
        store: Where to.
        folder: The checkpoint. It may be deleted or replaced meanwhile: then its copy stays incomplete.
        node: This node.
        confirm: Called before the copy is completed; raises an error if this run may not.
        stopped: Set to return early.
        tell: Called as files are sent.

    Returns:
        The name of the copy if this call has completed it.

    Raises:
        StoreError: The store has failed; to be called again.
    """
    try:
        text = read_bytes(folder / manifests.FILE)
        facts = manifests.read(folder)
    except (OSError, CheckpointError):  # deleted, as keep_last says
        return None
    name, sizes = name_of(facts.step, text), {file: entry.bytes for file, entry in facts.files.items()}
    there = store.sizes(name)
    if manifests.FILE in there:
        return None

    def is_there_still() -> bool:
        return _content(folder / manifests.FILE) == text

    began = time.monotonic()
    wanted = [file for file in sizes if node.copies(file)]
    try:
        _put(store, folder, name, _missing(there, {file: sizes[file] for file in wanted}), stopped, tell)
        if not node.is_first:
            return None
        patience = time.monotonic() + 2 * (time.monotonic() - began) + _MINUTE
        while missing := _missing(store.sizes(name), sizes):
            if stopped.is_set() or not is_there_still():
                return None
            # What another node has not copied by now is copied from here: it may be gone.
            late = time.monotonic() > patience
            now = {file: size for file, size in missing.items() if late or file in wanted}
            _put(store, folder, name, now, stopped, tell)
            stopped.wait(_POLL)
    except CheckpointError:
        if is_there_still():
            raise
        return None
    if stopped.is_set() or not is_there_still():
        return None
    confirm()
    store.write(f"{name}/{manifests.FILE}", text)
    return name


def copy_export(store: Store, folder: Path, stopped: threading.Event, tell: Tell) -> None:
    """Copy an export to `exports/`, its weights first, and then delete what an earlier one of this name has left."""
    name = f"exports/{folder.name}"
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    weights_first = sorted(sizes, key=lambda file: not file.endswith(".safetensors"))
    _put(store, folder, name, {file: sizes[file] for file in weights_first}, stopped, tell)
    if stopped.is_set():
        return
    for file in store.sizes(name).keys() - sizes.keys():
        store.delete(f"{name}/{file}")


def _put(store: Store, folder: Path, name: str, sizes: Mapping[str, int], stopped: threading.Event, tell: Tell) -> None:
    sent, total = 0, sum(sizes.values())

    def telling(before: int) -> Callable[[int], None]:
        return lambda part: tell(before + part, total)

    for file, size in sizes.items():
        if stopped.is_set():
            return
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{path}: is gone, or has not {size} bytes")
        store.put(path, f"{name}/{file}", telling(sent))
        sent += size
        tell(sent, total)


def _missing(there: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    return {file: size for file, size in sizes.items() if there.get(file) != size}


def _content(file: Path) -> bytes | None:
    try:
        return read_bytes(file)
    except OSError:
        return None
