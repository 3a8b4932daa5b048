"""Record chosen optimizer steps with `torch.profiler`, and their memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from unishard.config import Profile
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.contract.results import Step
from unishard.observe.observer import Observer
from unishard.observe.position import Position

_ENTRIES = 100_000
"""How many allocations a snapshot of CUDA memory holds."""

_logger = logging.getLogger("unishard")


class Profiling(Observer):
    """A trace of each run of consecutive steps, from the forward of the first to the update of the last."""

    def __init__(self, asked: Profile, order: Position, device: torch.device) -> None:
        self._asked = asked
        self._steps = frozenset(asked.steps)
        self._directory = Path(asked.dir or ".").absolute()  # now: the script may change its directory later
        self._order = order
        self._cuda = device.type == "cuda"
        self._running: Any = None
        self._first = 0
        self._span = ExitStack()
        """The name of the current step in the trace."""

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start with the first forward of a chosen step."""
        order = self._order
        if not order.begins_window or order.updates + 1 not in self._steps:
            return
        if self._running is None:
            self._start(order.updates + 1)
        self._span.close()  # that of a window that was discarded
        # The name under which tools look for steps, such as Holistic Trace Analysis.
        self._span.enter_context(record_function(f"ProfilerStep#{order.updates + 1}"))

    def on_step(self, step: Step) -> None:
        """Stop after the update of a step whose next one is not chosen."""
        if self._running is not None:
            self._span.close()
            if self._order.updates + 1 not in self._steps:
                self._stop()

    def on_close(self) -> None:
        """Give up a trace whose last step did not end.

        The profiler is not stopped: with DeepSpeed, stopping it inside an accumulation window corrupts memory (torch
        2.13, DeepSpeed 0.19.8, stage 3, CPU: the process ends with SIGSEGV or "free(): invalid next size" soon after).
        """
        if self._running is not None:
            self._span.close()
            _logger.warning(
                "profile: the run ended inside step %d, so its trace is not written", self._order.updates + 1
            )
            self._running = None

    def _start(self, step: int) -> None:
        self._first = step
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._running = profile(
            activities=activities,
            profile_memory=self._asked.memory,
            record_shapes=self._asked.shapes,
            acc_events=True,  # changes nothing in one cycle, but that torch does not warn of several (torch 2.11)
        )
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        self._running.start()

    def _stop(self) -> None:
        self._running.stop()
        name = f"steps-{self._first}-{self._order.updates}.rank{dist.get_rank()}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            trace = self._directory / f"{name}.trace.json"
            self._running.export_chrome_trace(str(trace))
            if self._snapshots:
                torch.cuda.memory._dump_snapshot(str(self._directory / f"{name}.memory.pickle"))  # type: ignore[no-untyped-call]
            elif self._asked.memory and not self._cuda:
                _write_timeline(trace, self._directory / f"{name}.memory.json")
        except (OSError, RuntimeError) as error:
            _logger.warning("profile: cannot write %s to %s; the training goes on: %s", name, self._directory, error)
        finally:
            if self._snapshots:
                torch.cuda.memory._record_memory_history(None)
            self._running = None

    @property
    def _snapshots(self) -> bool:
        """Whether a snapshot of CUDA memory is requested and possible."""
        return self._asked.memory and self._cuda and CORE_PRIVATE_API["memory-snapshot"].works


def _write_timeline(trace: Path, to: Path) -> None:
    """Write the memory events of a trace: bytes allocated at each time."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    totals = [(event["ts"], event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]"]
    points = [[time, size] for time, size in sorted(totals)]
    to.write_text(
        json.dumps({"time": "microseconds, as in the trace", "memory": "bytes allocated", "points": points}),
        encoding="utf-8",
    )
