"""What several ranks of a run do together, besides sharding its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from unishard.config.relevance import Not, OffAt, OnlyWith
from unishard.config.section import Section

_SPLIT = OnlyWith(
    {"size": Not(1)},
    "samples are not split",
    "is unused with size 1, which splits nothing; remove it or set size to 2 or more",
)


class SequenceParallel(Section):
    """Long sequences: a group of neighboring ranks shares each sample, and each rank has a part of its positions.

    `sequence: 4` stands for `sequence: {size: 4}`. Parameters, gradients and optimizer state stay sharded over all
    ranks, as `sharding` says. `training.micro_batch_size` counts the samples that a group shares.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("size",)

    size: Annotated[int, OffAt(1)] = Field(default=1, ge=1)
    """Ranks that share a sample; it must divide the number of ranks. 1: each rank has its own samples."""
    method: Annotated[Literal["auto", "ulysses", "allgather"], _SPLIT] = Field(default="auto")
    """How attention sees the whole sequence.

    `ulysses`: by all-to-all, each rank has all positions of some heads, so the size must divide the heads; key and
    value heads are repeated where they are fewer. `allgather`: each rank has all keys and values, for any number of
    heads; positions are dealt out so that causal work is balanced. `auto`: `ulysses` where the heads divide.
    """
    recurrences: Annotated[Literal["auto", "heads", "states"], _SPLIT] = Field(default="auto")
    """How recurrences of hybrid models see the whole sequence.

    `heads`: by all-to-all, as attention by `ulysses`. `states`: each rank computes its positions from a zero state, and
    an all-gather of states, which do not grow with the sequence, says what is missing; where the recurrence is known to
    be linear (gated delta rules, Mamba2), for documents that are not apart, else as `heads`. `auto`: the one of both
    that sends less, and `states` where heads do not divide.
    """
    keys: Annotated[Literal["auto"] | list[str], _SPLIT] = Field(default="auto")
    """Keys of the tensors of a batch that are split, `[batch, sequence, ...]`; `auto` for each that is as long as the
    inputs."""
    pad_to: Annotated[Literal["auto"] | Annotated[int, Field(ge=1)], _SPLIT] = Field(default="auto")
    """Sequences are padded at their end to a multiple of it; `auto` for the least that can be split."""

    @property
    def on(self) -> bool:
        """Whether samples are shared."""
        return self.size > 1

    @property
    def multiple(self) -> int:
        """What the length of a sequence is padded to a multiple of, if `method` is not decided for the model."""
        return 2 * self.size if self.method == "allgather" else self.size

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.on and self.pad_to != "auto" and self.pad_to % (2 * self.size):
            yield (
                "pad_to",
                f"is {self.pad_to}, no multiple of {2 * self.size}, which is twice the size; write one, or auto",
            )
        if self.keys == []:
            yield "keys", "is empty; name at least one key or write auto"


class ExpertParallel(Section):
    """Mixture-of-experts models: a group of neighboring ranks has the experts together, and each rank some of them.

    `expert: 4` stands for `expert: {size: 4}`. Each rank keeps its own samples; in a layer of experts, tokens go to the
    ranks that have their experts, and come back. What a rank has of the experts is sharded over the ranks with the same
    experts, everything else over all ranks, as `sharding` says.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("size",)

    size: Annotated[int, OffAt(1)] = Field(default=1, ge=1)
    """Ranks that have the experts together; it must divide the number of ranks and of experts. 1: each rank computes
    all experts."""

    @property
    def on(self) -> bool:
        """Whether ranks have different experts."""
        return self.size > 1


_CUT = OnlyWith(
    {"size": Not(1)},
    "weights are not cut",
    "is unused with size 1, which cuts nothing; remove it or set size to 2 or more",
)


class TensorParallel(Section):
    """Weights of single layers: a group of neighboring ranks has them together, and each rank a part of each.

    `tensor: 2` stands for `tensor: {size: 2}`. The ranks of a group have the same samples, and each computes its part
    of the heads and features. What a rank has of a weight is sharded over the ranks with the same part, everything else
    over all ranks, as `sharding` says. `training.micro_batch_size` counts the samples of a group.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("size",)

    size: Annotated[int, OffAt(1)] = Field(default=1, ge=1)
    """Ranks that have a layer together; it must divide the number of ranks, heads and features. 1: each rank computes
    whole layers."""
    plan: Annotated[Literal["auto"] | dict[str, str], _CUT] = Field(default="auto")
    """How modules and parameters are cut, by their names, in which `*` stands for a number.

    The values are styles of transformers, such as `colwise`, `rowwise`, `colwise_gather_output`, `embedding_rowwise`.
    `auto`: the plan that the model's class comes with.
    """

    @property
    def on(self) -> bool:
        """Whether ranks have different parts of weights."""
        return self.size > 1


class Parallel(Section):
    """What several ranks do together, besides sharding the training state."""

    sequence: SequenceParallel = Field(default_factory=SequenceParallel.model_construct)
    """Long sequences, of which each rank has a part."""
    expert: ExpertParallel = Field(default_factory=ExpertParallel.model_construct)
    """Experts of a mixture, of which each rank has some."""
    tensor: TensorParallel = Field(default_factory=TensorParallel.model_construct)
    """Weights of single layers, of which each rank has a part."""

    @property
    def on(self) -> bool:
        """Whether they do anything."""
        return self.sequence.on or self.expert.on or self.tensor.on

    @property
    def sharing(self) -> int:
        """Neighboring ranks that read the same samples."""
        return self.sequence.size * self.tensor.size

    @property
    def slices(self) -> str:
        """The fields by which ranks have different parts of weights; empty without."""
        return " and ".join(
            f"parallel.{name}" for name, section in (("expert", self.expert), ("tensor", self.tensor)) if section.on
        )
