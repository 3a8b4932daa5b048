"""What is put around the forward of a model before it is sharded."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from unishard.contract.plan import RunPlan
from unishard.logits.forward import ChunkedForward
from unishard.parallel.sliced_model import SlicedModel
from unishard.sequence.split_sequences import SplitSequences


class AroundForward:
    """Parts of the model that ranks have, sequences that they share, and a loss in chunks, where a config asks for
    them.
    """

    def __init__(self, model: nn.Module, plan: RunPlan, sliced: SlicedModel) -> None:
        """Put them around a model. Collective.

        Args:
            model: Not sharded yet.
            plan: Of the run.
            sliced: What this rank has of the model, which is closed with the rest.

        Raises:
            ModelError: The model cannot do one of them; it is as before.
        """
        chunk_tokens = None if plan.optimizer is None else plan.loop.loss_chunk_tokens
        self.sequences: SplitSequences | None = None
        with ExitStack() as put:
            put.callback(sliced.close)
            if chunk_tokens is not None:
                put.callback(ChunkedForward(model, chunk_tokens).close)
            if plan.sequence.on:
                self.sequences = SplitSequences(model, plan.sequence, plan.tensor)
                put.callback(self.sequences.close)
            self._put = put.pop_all()

    def close(self) -> None:
        """Leave the model as it was."""
        self._put.close()
