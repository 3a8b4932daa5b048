"""Rank 0's destinations, and the values that wait for the next record."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Collection

from torch import Tensor

from unishard.contract.plan import ObserveSpec
from unishard.distributed.on_ranks import ranks_of
from unishard.errors import ConfigError, Problem
from unishard.observe.destinations.table import open_writer
from unishard.observe.destinations.writer import Writer

_logger = logging.getLogger("unishard")


class Destinations:
    """Writes records to what `logging.to` names. Other ranks than the first have none.

    A record is written when the next update begins, so that it also has what the script logs after `step()`, such as an
    evaluation.
    """

    def __init__(self, spec: ObserveSpec, rank: int) -> None:
        """Open the files. Collective.

        Raises:
            ConfigError: On every rank: one cannot be opened.
        """
        self._writers: dict[str, Writer] = {}
        self._measured: dict[str, float] = {}
        self._logged: dict[str, tuple[float | Tensor, int]] = {}
        self._step = 0
        problems: list[Problem] = []
        for name in spec.logging.to if rank == 0 else ():
            try:
                self._writers[name] = open_writer(name, spec)
            except Exception as error:  # a library may raise anything
                problems.append(Problem("logging.to", f"{name} cannot be started: {type(error).__name__}: {error}"))
        problems = ranks_of(None).gather(problems)[0]
        if problems:
            self.close()
            raise ConfigError(problems)
        if self._writers:
            atexit.register(self.close)

    def measured(self, values: dict[str, float], step: int) -> None:
        """Add the engine's values."""
        self._measured |= values
        self._step = step

    def logged(self, name: str, value: float | Tensor, step: int) -> None:
        """Add one of the user's values; several of one name are averaged."""
        total, count = self._logged.get(name, (0.0, 0))
        self._logged[name] = (total + value, count + 1)
        self._step = step

    def write(self, *, but: Collection[str] = (), user_values: bool = True) -> None:
        """Write what waits, if there is anything.

        Args:
            but: Destinations to leave out.
            user_values: Whether to write the user's values too, or let them wait for those that may still come.
        """
        values, self._measured = self._measured, {}
        if user_values:
            values |= {name: float(total) / count for name, (total, count) in self._logged.items()}
            self._logged = {}
        if not values:
            return
        for name in [name for name in self._writers if name not in but]:
            self._attempt(name, lambda writer: writer.write(self._step, values))
        # Libraries end their runs at exit; whoever registers last is called first.
        atexit.unregister(self.close)
        atexit.register(self.close)

    def resume(self, step: int) -> None:
        """Continue after a step."""
        for name in list(self._writers):
            self._attempt(name, lambda writer: writer.resume(step))

    def close(self) -> None:
        """Write what waits, and close the files."""
        atexit.unregister(self.close)
        self.write()
        for name in list(self._writers):
            self._attempt(name, lambda writer: writer.close())
        self._writers = {}
        atexit.unregister(self.close)

    def _attempt(self, name: str, act: Callable[[Writer], None]) -> None:
        """Call a writer; one that fails is left out from then on, and the training goes on."""
        try:
            act(self._writers[name])
        except Exception as error:  # a library may raise anything
            del self._writers[name]
            _logger.warning(
                "logging.to: %s failed, and nothing more is written to it: %s: %s", name, type(error).__name__, error
            )
