"""Writes TensorBoard's event files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unishard.contract.plan import ObserveSpec
from unishard.observe.destinations.writer import Values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars under `logging.dir`, read by `tensorboard --logdir`."""

    def __init__(self, spec: ObserveSpec) -> None:
        self._directory = spec.logging.dir
        self._writer: SummaryWriter = self._open(None)

    def write(self, step: int, values: Values) -> None:
        """Add one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def resume(self, step: int) -> None:
        """Let TensorBoard drop what an earlier run wrote for later steps (`purge_step`)."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _open(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._directory, purge_step=purge_step)
