"""The training loop: batch sizes, accumulation, clipping, seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from unishard.config.patterns import Pattern
from unishard.config.section import Section
from unishard.config.spellings import pair

_Stage = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]], BeforeValidator(pair)]
"""An update, and the micro-batches per rank from it on."""


class Training(Section):
    """The training loop: batch sizes, accumulation, clipping, seed."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Samples in one forward on one rank."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per rank and update; their gradients are averaged."""
    batch_ramp: Annotated[list[_Stage], Field(min_length=1)] | None = Field(default=None)
    """A batch that grows: pairs of an update and the `gradient_accumulation_steps` from it on. `[[0, 2], [500, 4]]`
    has 2 in the first 500 updates and then 4, with which `gradient_accumulation_steps` must agree. Skipped updates
    count. Loops that say where a window ends, such as `engine.windows` with `lengths`, do not follow it."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples in one update over all ranks, after a `batch_ramp`. Only checked: it must equal micro_batch_size x
    gradient_accumulation_steps x ranks. If omitted, it is computed."""
    gradient_clipping: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum global L2 norm of the gradients. `null` for no clipping."""
    backward_calls: int = Field(default=1, ge=1)
    """How often `engine.backward` is called for each micro-batch, each time after a forward of its own, with a part of
    the loss, as where the activations of two forwards do not fit together. The parts are added up: they are not divided
    by this number. With `num_items` each call counts its own."""
    loss_chunk_tokens: int | None = Field(default=None, ge=1)
    """How many tokens' logits a language model of transformers makes at once where it is called with labels: its head
    and its loss run over so many at a time, and once more in backward. `null` for all. Memory of the loss then does not
    grow with the tokens of a micro-batch; losses do not change. Your own model calls `unishard.chunked_loss`."""
    nonfinite: Literal["skip", "raise", "ignore"] = Field(default="skip")
    """What happens to an update whose gradients contain an infinity or a NaN on any rank: `skip` skips it, `raise`
    raises `NonFiniteError`; both leave parameters, optimizer state and schedule unchanged. `ignore` applies it, as
    plain torch does."""
    last_window: Literal["step", "drop"] = Field(default="step")
    """What happens to micro-batches at the end of the data that do not fill an accumulation window: `step` averages
    over them, `drop` skips them."""
    buffers: (
        Literal["sync", "rank0", "local"]
        | Annotated[
            dict[Pattern, Literal["mean", "sum", "min", "max", "rank0", "local"]],
            Field(min_length=1),
        ]
    ) = Field(default="sync")
    """How buffers that ranks have changed by their own data, such as the running statistics of BatchNorm, are merged
    when the model is put in evaluation mode, saved or exported: `sync` averages them over the ranks (integers are rank
    0's), `rank0` takes rank 0's, `local` leaves each rank its own. Or a mapping of regular expressions, matched
    anywhere in the names of buffers, to `mean`, `sum`, `min`, `max`, `rank0` or `local`: the first that matches counts,
    other buffers are merged as in `sync`. `sum` adds what each rank has added since the last merge. Only an evaluation
    changes the buffers of the model. Buffers that are not persistent do not change."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the data order and, plus the rank, of torch's random numbers after `prepare`."""

    def accumulation_at(self, update: int) -> int:
        """Micro-batches per rank in an update; the first one is 0."""
        if self.batch_ramp is None:
            return self.gradient_accumulation_steps
        return next(steps for first, steps in reversed(self.batch_ramp) if first <= update)

    def _problems(self) -> Iterator[tuple[str, str]]:
        stages = self.batch_ramp or [(0, self.gradient_accumulation_steps)]
        (first, _), (_, last) = stages[0], stages[-1]
        if first:
            yield "batch_ramp", f"must begin with update 0, got {first}"
        elif any(start >= later or few >= more for (start, few), (later, more) in pairwise(stages)):
            yield "batch_ramp", "must rise: each pair needs a later update and more micro-batches than the one before"
        elif last != self.gradient_accumulation_steps:
            steps = f"gradient_accumulation_steps is {self.gradient_accumulation_steps}"
            yield "batch_ramp", f"ends with {last}, but {steps}; write the same number in both"
