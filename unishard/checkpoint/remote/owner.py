"""The run that copies to a store, so that no two do: the file `.owner` there, in the form of `lease`.

Many stores have neither locks nor files that can be created only once. So this is less strict than a directory's owner:
two runs that begin within a second may both go on, until one of them reads the other's name before it completes or
deletes a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from unishard.checkpoint import lease
from unishard.checkpoint.remote.store import Store, StoreError
from unishard.errors import CheckpointError

BEAT = 15.0
"""Seconds between two beats of a living owner."""


class StoreOwner:
    """That this process copies to a store. Only rank 0 of a run has one."""

    def __init__(self, store: Store, run: Callable[[], str]) -> None:
        """Own nothing yet.

        Args:
            store: The store.
            run: Returns the run, for the messages of others.
        """
        self._store, self._run = store, run
        self._head = b""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: str | None = None
        """What has become of it, if another run copies there."""

    def claim(self) -> None:
        """Become the owner, or check that this process still is.

        Raises:
            CheckpointError: Another run copies there, and is alive or has taken over.
            StoreError: It cannot be known.
        """
        there = self._read()
        if there is not None and there.owner != lease.token():
            if self._thread is not None:
                self.lost = f"{self._store.url}: {there} copies its checkpoints here now"
            elif not there.is_gone and not lease.has_ended(there, self._read, self._store.url, 1):
                raise CheckpointError(
                    f"{self._store.url}: {there} copies its checkpoints here and is still alive; set another "
                    "checkpoint.copy_to, or end that run first"
                )
        if self.lost:
            raise CheckpointError(f"{self.lost}; this run copies nothing more; set another checkpoint.copy_to")
        if self._thread is None:
            self._head = lease.text_of(self._run(), 0).partition(b"\n")[0]
            self._write("0")
            self._thread = threading.Thread(target=self._beat, name="unishard-copies-owner", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Say that this process copies no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            if not self.lost:
                try:
                    self._write(lease.RELEASED)
                except StoreError:  # others see that the beats have stopped
                    return

    def _beat(self) -> None:
        number = 0
        while not self._closed.wait(BEAT) and not self.lost:
            number += 1
            try:
                there = self._read()
                if there is None or there.owner == lease.token():
                    self._write(str(number))
            except StoreError:  # the next beat tries again
                continue

    def _read(self) -> lease.Lease | None:
        text = self._store.read(lease.FILE)
        if text is None:
            return None
        head, _, beats = text.partition(b"\n")
        return replace(lease.parsed(head, beats.decode("ascii", "replace")), number=0)

    def _write(self, beats: str) -> None:
        self._store.write(lease.FILE, self._head + b"\n" + beats.encode() + b"\n")
