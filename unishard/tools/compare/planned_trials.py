"""What the plan knows of a model, for `unishard tune`. Imports torch only for what is not cached."""

from __future__ import annotations

from collections.abc import Callable

from unishard.config import Config
from unishard.errors import ModelError
from unishard.tools.compare.trials import PlannedFacts, Recomputation
from unishard.tools.plan.activations import Activations
from unishard.tools.plan.devices import Device
from unishard.tools.plan.model import PlannedModel
from unishard.tools.plan.questions import by_micro_batch


class PlannedModelFacts:
    """The activations of a model under each kind of recomputation."""

    def __init__(self, model: PlannedModel, seq_len: int) -> None:
        """Hold the model.

        Args:
            model: The model.
            seq_len: Tokens of a sample.
        """
        self._model, self._seq_len = model, seq_len
        self._known: dict[Recomputation, Callable[[int], Activations] | None] = {}
        self.note = ""
        """Why activations are not known."""

    def activations(self, word: Recomputation, micro_batch_size: int) -> Activations | None:
        """Those of a micro-batch; None if the model cannot be run like this."""
        if word not in self._known:
            try:
                self._known[word] = by_micro_batch(
                    lambda size, length: self._model.activations(
                        size, length, word if isinstance(word, str) else list(word)
                    ),
                    self._seq_len,
                )
            except ModelError as error:
                self._known[word] = None
                self.note = self.note or str(error)
        scaled = self._known[word]
        return None if scaled is None else scaled(micro_batch_size)


def facts_of(name: str, cfg: Config, device: Device | None, seq_len: int) -> tuple[PlannedFacts, str]:
    """What the plan needs to drop candidates, and why activations are not known, if they are not.

    Args:
        name: The model, as for `unishard plan`.
        cfg: The config.
        device: What they run on.
        seq_len: Tokens of a sample.

    Raises:
        ConfigError: The model cannot be built.
    """
    model = PlannedModel(name, cfg)
    known = PlannedModelFacts(model, seq_len)
    known.activations("none", 1)
    return PlannedFacts(model.shape, known.activations, device), known.note
