"""Checks that all ranks make the same collective calls; on a mismatch, raises an error on all ranks that names each
rank's call.

Each rank hashes its calls (`CallLog`), all of them, and before some of them it sends the hash to the others over gloo
and waits for theirs: before each call in the first updates and in long ones, twice in every tenth of the others, and
always before rare calls. If all are equal, the call continues; else the ranks exchange their last calls and raise an
error, before the collectives of this call. Ranks that already wait in collectives after calls that were not compared
are found by the watchdog.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from unishard.config import Communication
from unishard.distributed.process_group import timeout
from unishard.errors import RankMismatchError
from unishard.failures import monitor_client
from unishard.failures.call_log import Call, CallLog, tail_from
from unishard.failures.compared_call import ComparedCall
from unishard.failures.deadlocks import different_calls
from unishard.failures.device_wait import DeviceWait
from unishard.failures.digest_exchange import DigestExchange
from unishard.failures.endings import headline, is_lost_connection
from unishard.failures.watchdog import watch

_ANSWER = 3.0
"""Seconds to wait for another rank to report its call."""
_EVERY = 10
"""Wait for the other ranks in every tenth optimizer step, and before all calls of the first ten."""
_LONG = 1.0
"""Seconds: before all calls of steps that take longer, waiting costs nothing that is noticed."""
_REPORTED = 8
"""Calls that a rank reports when it closes an engine."""

_current: DesyncCheck | None = None
_begun = 0
"""Calls of `begin` without a check."""


class Member:
    """One engine's access to the check."""

    def __init__(self, check: DesyncCheck) -> None:
        self._check = check
        check.members += 1
        check.active += 1
        self._number = check.members

    def check_now(self, call: ComparedCall, where: str, seconds: float) -> float:
        """Check the ranks before the collectives of a call. Collective.

        Args:
            call: The same on all ranks.
            where: The position in the loop.
            seconds: A time that this rank has measured.

        Returns:
            The longest time of all ranks.

        Raises:
            RankMismatchError: Another rank is in another call, has closed its engine, or is gone; names each rank's
                call.
        """
        return self._check.check_now(self._logged(call, where), seconds)

    def record(self, call: ComparedCall, where: str) -> None:
        """Record a call, which the next `check_now` checks.

        Raises:
            RankMismatchError: The ranks have been found to differ.
        """
        self._check.record(self._logged(call, where))

    def enter_module(self, name: str, *, wait: bool) -> None:
        """Record that the forward enters a module whose parameters are gathered; with `wait`, check it as in
        `check_now`.
        """
        if wait:
            self._check.check_now(Call(unit=name))
        else:
            self._check.record(Call(unit=name))

    def leave(self, why: BaseException | None = None) -> None:
        """Report that this engine is closed. Does not wait; ranks that still use the engine raise an error."""
        closed = f"has closed the {self._name}"
        self._check.active -= 1
        self._check.leave(closed, why)

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[None]:
        """Wrap collectives on a device, so that the watchdog knows what the host waits for in the block, or after
        it.
        """
        self._check.device_wait = wait = DeviceWait.on(device) if device.type == "cuda" else None
        try:
            yield
        except BaseException:
            self._check.device_wait = None
            raise
        if wait is not None:
            wait.end()

    def _logged(self, call: ComparedCall, where: str) -> Call:
        place = f"is in {self._name}.{call.name} ({where}{call.detail})"
        return Call(place, "", call.skipped, call.order, json.dumps(call.held) if call.held else "")

    @property
    def _name(self) -> str:
        return "engine" if self._check.active == 1 else f"engine {self._number}"


def begin(cfg: Communication) -> None:
    """Start the check of the current process group if the config asks for one. Collective.

    Raises:
        RankMismatchError: A rank is gone, or the ranks differ in `communication.desync_check`.
    """
    global _current, _begun
    if (monitor := monitor_client.current()) is not None:
        monitor.be_patient(cfg.desync_timeout)
    if (check := _of_this_group()) is not None:
        check.timeout, check.limit = cfg.desync_timeout, timeout().total_seconds()
    if check is not None or dist.get_world_size() == 1:
        return
    _begun += 1
    if monitor is not None:
        wait = {"purpose": "to call unishard.prepare", "patience": cfg.desync_timeout}
        answers = monitor.collect(f"check/{_begun}", cfg.desync_check, **wait)  # type: ignore[arg-type]
        if len(answers) < monitor.size:
            raise RankMismatchError(f"{monitor.cause(1.0)}; it was waited for in unishard.prepare")
        if len(set(answers.values())) > 1:
            values = ", ".join(f"rank {rank} has {value}" for rank, value in sorted(answers.items())[:8])
            raise RankMismatchError(
                f"ranks hold different configs; start every rank with the same:\ncommunication.desync_check: {values}"
            )
    if cfg.desync_check:
        _current = DesyncCheck(cfg.desync_timeout, _begun)


def check_now(place: str) -> None:
    """Check a call outside an engine, if this process group has a check. Collective."""
    if (check := _of_this_group()) is not None:
        check.check_now(Call(f"is in {place}"))


@contextmanager
def announce_errors(place: str) -> Iterator[None]:
    """A block outside an engine with collectives.

    If it raises, the other ranks learn of it, and raise where they wait for this one.
    """
    try:
        yield
    except RankMismatchError:  # the other ranks know
        raise
    except BaseException as error:
        if (check := _of_this_group()) is not None:
            check.leave(f"has left {place}", error)
        raise


def samples_all(updates: int, seconds: float) -> bool:
    """Whether ranks wait for each other before every call of an optimizer step: in the first ones, and in long ones.

    Waking another process takes about a millisecond on a busy machine, too much for every call of a short step. The
    other calls are hashed, and compared in the next one that is checked.

    Args:
        updates: Completed accumulation windows of an engine, the same on every rank.
        seconds: What a step takes, the same on every rank.
    """
    return updates < _EVERY or seconds >= _LONG


def samples(updates: int) -> bool:
    """Whether ranks wait for each other where an optimizer step begins, and before its update, however short it is: in
    the first ones, and in every tenth.

    Args:
        updates: As in `samples_all`.
    """
    return updates < _EVERY or updates % _EVERY == 0


def samples_modules(updates: int) -> bool:
    """Whether ranks also wait for each other before each module whose parameters are gathered.

    Args:
        updates: As in `samples_all`.
    """
    return updates < _EVERY


def join(cfg: Communication) -> Member | None:
    """Join the check of the current process group; None if there is nothing to check. Collective."""
    if dist.get_world_size() == 1 or not cfg.desync_check:
        return None
    begin(cfg)
    check = _of_this_group()
    return None if check is None else Member(check)


def _of_this_group() -> DesyncCheck | None:
    return _current if _current is not None and dist.is_initialized() and _current.world is dist.group.WORLD else None


class DesyncCheck:
    """The check of all ranks of one process group. Used by one thread at a time."""

    def __init__(self, patience: float, serial: int = 0) -> None:
        """Create the check. Collective.

        Args:
            patience: Seconds after which a late rank is named.
            serial: Another one for each check of this process.
        """
        self.world = dist.group.WORLD
        self.timeout = patience
        self.limit = timeout().total_seconds()
        self._serial = serial
        self.members = self.active = 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gloo = {part.partition(":")[2] for part in dist.get_backend_config().split(",")} == {"gloo"}
        self.monitor = monitor_client.current()
        self.call_log = call_log = CallLog()
        if self.monitor is not None:
            self.monitor.place = call_log.now
        self._exchange = DigestExchange(self.rank, self.size)
        self.failed = ""
        self.waiting = False
        self.device_wait: DeviceWait | None = None
        self.thread = threading.get_ident()
        self.moved = time.monotonic()
        self._lock = threading.Lock()
        watch(self)

    def record(self, call: Call) -> None:
        """See `Member.record`."""
        if self.failed:
            raise RankMismatchError(self.failed)
        self.moved = time.monotonic()
        if not call.unit:
            self.thread = threading.get_ident()
        self.call_log.record(call)

    def check_now(self, call: Call, seconds: float = 0.0) -> float:
        """See `Member.check_now`."""
        with self._waits():
            if (different := self._exchange.first_different()) is not None:
                raise RankMismatchError(self._report(different))
            with self._lock:  # the watchdog may answer for this rank at the same time
                self.record(call)
            equal, slowest = self._exchange.compare(self.call_log.state, int(seconds * 1e6))
            if not equal:
                raise RankMismatchError(self._report(self._exchange.number))
            return slowest / 1e6

    def leave(self, place: str, why: BaseException | None) -> None:
        """See `Member.leave`."""
        if self.failed or self.world is not dist.group.WORLD:
            return
        with self._lock:
            self.call_log.record(Call(place, error="" if why is None else _headline(why)))
            self.moved = time.monotonic()
            self._exchange.send(self.call_log.state)
        if self.monitor is not None:
            tail = self.call_log.tail()
            self.monitor.give(self._key(self._exchange.number), tail._replace(calls=tail.calls[-_REPORTED:]))

    def give_up(self, why: str) -> None:
        """Called by the watchdog: no rank can go on."""
        with self._lock:
            self.failed = self.failed or why
            if not self.waiting:
                self._exchange.say_absent()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """A block in which this rank waits for the others."""
        if self.failed:
            raise RankMismatchError(self.failed)
        self.waiting, self.moved = True, time.monotonic()
        try:
            yield
        except RankMismatchError:
            raise
        except RuntimeError as error:
            if not is_lost_connection(error):  # torch's handler of SIGCHLD raises anywhere: a worker was killed
                raise
            # The other rank is gone, or later than the timeout of the process group.
            self.failed = self._report(self._exchange.number)
            raise RankMismatchError(self.failed) from None
        finally:
            with self._lock:
                self.waiting, self.moved = False, time.monotonic()
                if self.failed:
                    self._exchange.say_absent()

    def _report(self, number: int) -> str:
        """Exchange the last calls after a digest that differed, and describe where they differ."""
        monitor, tail = self.monitor, self.call_log.tail()
        if monitor is None:
            return different_calls({self.rank: tail}, dict.fromkeys(set(range(self.size)) - {self.rank}, ""))
        answers = {} if monitor.abort_reason else monitor.collect(self._key(number), tail, seconds=_ANSWER)
        if monitor.abort_reason:
            return monitor.abort_reason
        missing = set(range(self.size)) - answers.keys()
        if missing:
            monitor.wait(lambda: missing <= monitor.endings.keys(), 1.0)
        self.call_log.restart(number)
        gone = {rank: monitor.endings[rank].text if rank in monitor.endings else "" for rank in missing}
        return different_calls({rank: tail_from(value) for rank, value in answers.items()}, gone)

    def _key(self, number: int) -> str:
        return f"report/{self._serial}/{number}"


def _headline(error: BaseException) -> str:
    """An error in one line; a RankMismatchError only by its name, since its message lists all ranks again."""
    return type(error).__name__ if isinstance(error, RankMismatchError) else headline(error)
