"""Copies in a background thread, one after the other; what fails is tried again."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from unishard.checkpoint.remote.store import StoreError
from unishard.config.describe import count_of
from unishard.distributed.error_text import text_of

PATIENCE = 300.0
"""Seconds for which a store may fail at the end of a run, until the rest is given up."""
_LONGEST_PAUSE = 60.0
"""Seconds between two attempts, at most: they double from one."""
_SAID_EVERY = 10.0
"""Seconds between two lines of progress."""

_logger = logging.getLogger("unishard")


class Upload(NamedTuple):
    """One folder to copy."""

    name: str
    """For messages."""
    copy: Callable[[threading.Event, Callable[[int, int], None]], None]
    """Copies what is not there yet, and tells how many bytes are sent, and of how many. Raises StoreError to be called
    again; may return early once the event is set."""


class Uploads:
    """The uploads of one process. No call but `close` waits for the store."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._left: deque[Upload] = deque()
        self._changed = threading.Condition()
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._closed_at = 0.0
        self._thread: threading.Thread | None = None
        self._sent = (0, 0)
        """Of the folder that is being copied, as `Upload.copy` has told."""
        self._sent_at = 0.0
        self.failed = 0
        """How many attempts have failed."""

    def add(self, upload: Upload) -> None:
        """Copy a folder soon."""
        with self._changed:
            self._left.append(upload)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unishard-copies", daemon=True)
                self._thread.start()
                atexit.register(self._say_left)  # a script that ends without `close`

    def close(self) -> None:
        """Wait until everything is copied, or the store has failed for `PATIENCE`; interrupted, give up at once."""
        if self._thread is None:
            return
        with self._changed:
            self._closed_at = time.monotonic()
            self._closing.set()
            self._changed.notify()
        try:
            while self._thread.is_alive():
                self._thread.join(_SAID_EVERY)
                if self._thread.is_alive():
                    _logger.warning("%s: still copying %s%s", self._url, self._names(), self._progress())
        except BaseException:
            self._abandoned.set()
            raise
        finally:
            atexit.unregister(self._say_left)
            self._say_left()
            if self.failed:
                _logger.warning("%s: %s to copy failed", self._url, count_of(self.failed, "attempt"))

    def _say_left(self) -> None:
        if self._left:
            _logger.error(
                "%s: not copied: %s, which the next run with this checkpoint.dir and copy_to does; engine.close() "
                "waits for copies",
                self._url,
                self._names(),
            )

    def _names(self) -> str:
        return ", ".join(upload.name for upload in list(self._left))

    def _progress(self) -> str:
        """What is sent of the first folder, and since when no more: a request may hang until its client gives up."""
        (sent, total), silent = self._sent, time.monotonic() - self._sent_at
        said = f"; sent {sent / 1e6:,.1f} of {total / 1e6:,.1f} MB of the first, the last {silent:.0f} s ago"
        return said * bool(total)

    def _tell(self, sent: int, total: int) -> None:
        self._sent, self._sent_at = (sent, total), time.monotonic()

    def _run(self) -> None:
        failures, since = 0, 0.0
        while not self._abandoned.is_set():
            with self._changed:
                while not self._left and not self._closing.is_set():
                    self._changed.wait()
                if not self._left:
                    return
                upload = self._left[0]
            try:
                upload.copy(self._abandoned, self._tell)
            except StoreError as error:
                failures, self.failed, now = failures + 1, self.failed + 1, time.monotonic()
                since = since or now
                if self._closing.is_set() and now - max(since, self._closed_at) > PATIENCE:
                    return
                pause = min(2.0 ** (failures - 1), _LONGEST_PAUSE)
                _logger.warning("%s: attempt %d failed: %s; the next in %.0f s", upload.name, failures, error, pause)
                (self._abandoned if self._closing.is_set() else self._closing).wait(pause)
                continue
            except Exception as error:  # another run copies there, or the folder cannot be read
                _logger.error("%s: not copied: %s", upload.name, text_of(error))
            failures, since, self._sent = 0, 0.0, (0, 0)
            with self._changed:
                self._left.popleft()
