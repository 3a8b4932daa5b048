"""What is put around the forward of a model before it is sharded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from unishard.config.data_share import shared_by
from unishard.contract.plan import RunPlan
from unishard.data.batches import to_device
from unishard.data.shared_samples import SharedSamples
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
        self.sliced = sliced
        self.sequences: SplitSequences | None = None
        self.sharing = plan.topology.world_size // plan.data_share.of
        """Neighboring ranks that read the same samples."""
        self.samples = self.calls = None
        if self.sharing > 1:
            self.samples = SharedSamples(self.sharing, shared_by(plan.sequence.size, plan.tensor))
        if plan.tensor > 1:
            self.calls = SharedSamples(plan.tensor, "parallel.tensor.size")
        with ExitStack() as put:
            put.callback(sliced.close)
            if chunk_tokens is not None:
                put.callback(ChunkedForward(model, chunk_tokens).close)
            if plan.sequence.on:
                self.sequences = SplitSequences(model, plan.sequence, plan.tensor)
                put.callback(self.sequences.close)
            self._put = put.pop_all()

    def place(self, batch: Any, device: torch.device) -> Any:
        """What this rank gets of a batch, on its device. Collective among ranks that share samples.

        Raises:
            DataError: They have read different ones, or these cannot be split.
        """
        if self.samples is not None:
            self.samples.require(batch)
        return to_device(batch, device) if self.sequences is None else self.sequences.place(batch, device)

    def refuse_failure(self, error: Exception) -> None:
        """Raise ModelError in place of an error of the first forward, if it may be one of parts of a model or of
        samples.
        """
        self.sliced.refuse_failure(error)
        if self.sequences is not None:
            self.sequences.refuse_failure(error)

    def close(self) -> None:
        """Leave the model as it was."""
        self._put.close()
