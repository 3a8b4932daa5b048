"""What is sharded across the ranks, and in which units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from unishard.config.paths import Directory
from unishard.config.section import Section, Spellings, lower, refuse

_ALIASES = {
    "ddp": "no_shard",
    "zero0": "no_shard",
    "zero1": "shard_optimizer",
    "zero2": "shard_grad_op",
    "zero3": "full_shard",
    "hsdp": "hybrid_shard",
    "hybridshardzero2": "hybrid_shard_grad_op",
}
_WITHIN_GROUP = {"hybrid_shard": "full_shard", "hybrid_shard_grad_op": "shard_grad_op"}


def _strategy(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        raise PydanticCustomError(
            "bare_integer",
            "a number is ambiguous (1 is FULL_SHARD in Accelerate and ZeRO-1 in DeepSpeed), got {value}; "
            "write the name, such as full_shard or zero3",
            {"value": value},
        )
    if not isinstance(value, str):
        return value
    name = value.strip().lower().replace("-", "_")
    return _ALIASES.get(name.replace("_", ""), name)


Strategy = Annotated[
    Literal["no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_grad_op"],
    BeforeValidator(_strategy),
    Spellings((*_ALIASES, "hybrid_shard_zero2", "_hybrid_shard_zero2")),
]


class Sharding(Section):
    """What is sharded across the ranks, and in which units."""

    shorthand: ClassVar[tuple[str, ...]] = ("strategy",)
    renamed: ClassVar[Mapping[str, str]] = {"whole_units": "conditional_modules"}

    strategy: Strategy = Field(default="full_shard")
    """What is sharded.

    `no_shard`: nothing; every rank holds the whole training state (DDP, ZeRO-0). `shard_optimizer`: fp32 master weights
    and optimizer state (ZeRO-1). `shard_grad_op`: also gradients, reduced on every micro-batch (ZeRO-2). `full_shard`:
    also parameters, gathered unit by unit (FSDP FULL_SHARD, ZeRO-3). `hybrid_shard` and `hybrid_shard_grad_op`:
    `full_shard` and `shard_grad_op` within groups of `group_size` ranks, replicated across groups (FSDP HYBRID_SHARD,
    MiCS). FSDP's enum names, `ddp`, `hsdp` and `zero0` to `zero3` are accepted in any case.
    """
    group_size: int | None = Field(default=None, ge=2)
    """Ranks in one sharding group (`hybrid_shard` and `hybrid_shard_grad_op` only); it must divide the number of ranks.
    Consecutive ranks form a group. `null` for the ranks of one node. A group of all ranks means no replication."""
    reshard_after_forward: bool | int = Field(default=True)
    """Whether a unit's parameters are freed after its forward and gathered again for its backward (`full_shard`
    and `hybrid_shard` only). `false` halves the all-gathers and needs more memory. A number, such as the ranks of one
    node, keeps a shard of the gathered parameters on each of so many ranks, so that backward gathers among these only;
    it must divide the ranks that share one copy."""
    units: Literal["auto"] | list[str] = Field(default="auto")
    """Modules whose parameters are gathered together: class names such as `[LlamaDecoderLayer]`, or `auto` for the
    model's repeated blocks (`_no_split_modules` of a Hugging Face model)."""
    min_unit_params: int = Field(default=0, ge=0)
    """Modules with fewer parameters than this are not units."""
    conditional_modules: list[str] = Field(default=[])
    """Classes of modules that a rank may skip in a micro-batch, entirely or partly, such as experts behind a router or
    an image tower. Neither they nor modules inside them are units: they are gathered and reduced with the enclosing
    unit, or with the root if there is none. A rank that does not use one of their parameters contributes zeros to the
    average."""

    @property
    def within_group(self) -> str:
        """The strategy within a sharding group: `full_shard` for `hybrid_shard`, itself for one that is not hybrid."""
        return _WITHIN_GROUP.get(self.strategy, self.strategy)

    @property
    def reshard_group(self) -> int | None:
        """The ranks among which a unit is sharded between its forward and its backward, if `reshard_after_forward` is a
        number.
        """
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    @property
    def hybrid(self) -> bool:
        """Whether each group of ranks holds a copy."""
        return self.strategy in _WITHIN_GROUP

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.changed
        problems: list[tuple[str, str]] = []
        if self.strategy == "no_shard":
            problems += [
                (field, "is unused with strategy no_shard, which gathers nothing; remove it or choose full_shard")
                for field in ("units", "min_unit_params")
                if field in given
            ]
        if not self.hybrid and self.group_size is not None:
            problems.append(
                (
                    "group_size",
                    f"is unused with strategy {self.strategy}, which has no groups; remove it or choose hybrid_shard",
                )
            )
        if self.within_group != "full_shard" and "reshard_after_forward" in given:
            problems.append(
                ("reshard_after_forward", f"is unused with strategy {self.strategy}; remove it or choose full_shard")
            )
        elif self.reshard_group is not None and self.reshard_group < 2:
            problems.append(
                (
                    "reshard_after_forward",
                    f"is {self.reshard_group}; write a number of ranks from 2 on, or true or false",
                )
            )
        if self.units == []:
            problems.append(("units", "is empty; name at least one class or write auto"))
        if self.units != "auto":
            problems += [
                (
                    "conditional_modules",
                    f"{name} is also in units, but a conditional module cannot be a unit; remove it from one of the "
                    "two",
                )
                for name in self.conditional_modules
                if name in self.units
            ]
        refuse(problems)
        return self


# -- Sizes and timing of collectives. No field here changes the results ----------------------------


class Communication(Section):
    """Sizes and timing of collectives. No field here changes the results."""

    reduce_bucket_size: int = Field(default=25_000_000, ge=1)
    """Gradient elements reduced in one collective, on engines that use buckets."""
    prefetch_bucket_size: int | None = Field(default=None, ge=0)
    """Parameter elements that may be gathered before they are used (`full_shard`). `null` for those of the next unit,
    whatever its size; 0 disables prefetching."""
    overlap: bool = Field(default=True)
    """Whether gradients are reduced during backward, where the engine has this option."""
    desync_check: bool = Field(default=True)
    """Whether to check that all ranks make the same collective calls: one by one in the first ten updates and in every
    tenth after them, and all calls before a save. On a mismatch, every rank raises an error that names each rank's
    call, instead of hanging."""
    desync_timeout: float = Field(default=10.0, gt=0, le=1800)
    """Seconds until that error is raised. A rank that is late outside unishard is named in a warning instead, and
    waited for."""


# -- What is kept in host memory or on a local disk instead of accelerator memory ------------------

Place = Literal["none", "cpu", "nvme"]


class Offload(Section):
    """What is kept outside accelerator memory while it is not in use.

    `offload: cpu` stands for both parameters and optimizer.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("params", "optimizer")

    params: Place = Field(default="none")
    """Where sharded parameters and their fp32 master weights are kept: on the accelerator, in host memory (`cpu`), or
    in files (`nvme`)."""
    optimizer: Place = Field(default="none")
    """Where the optimizer state is kept. With `cpu` and `nvme` the optimizer runs on the host."""
    pin_memory: bool = Field(default=True)
    """Whether offloaded tensors use page-locked host memory (faster copies; needs a CUDA device)."""
    nvme_path: Directory = Field(default=None)
    """Directory for the files of `nvme`, on a local disk of each node; required with `nvme`. Each rank writes its own
    files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = (self.params, self.optimizer)
        problems: list[tuple[str, str]] = []
        if "nvme" in places and not self.nvme_path:
            problems.append(
                ("nvme_path", "is required with nvme; write a directory on a local disk, or use cpu instead of nvme")
            )
        if self.nvme_path is not None and "nvme" not in places:
            problems.append(
                ("nvme_path", "is unused: nothing is offloaded to nvme; remove it or set offload.params to nvme")
            )
        if "pin_memory" in self.changed and places == ("none", "none"):
            problems.append(
                ("pin_memory", "is unused: nothing is offloaded; remove it or set offload.optimizer to cpu")
            )
        refuse(problems)
        return self


# -- Activation checkpointing and compilation ------------------------------------------------------


Word = Annotated[Literal["none", "full", "selective"], Spellings()]

ActivationCheckpointing = Annotated[Word | list[str], BeforeValidator(lower)]


class Compile(Section):
    """`torch.compile`, in place: names of modules and parameters do not change."""

    shorthand: ClassVar[tuple[str, ...]] = ("mode",)

    mode: Annotated[Literal["none", "per_block", "full"], BeforeValidator(lower), Spellings()] = Field(default="none")
    """`per_block` compiles the model's repeated blocks; their common code is compiled once. `full` compiles the whole
    model, with a graph break wherever the engine gathers a unit."""
    backend: str = Field(default="inductor")
    """torch.compile's backend: `inductor` generates kernels (on the CPU it needs a C++ compiler); `aot_eager` and
    `eager` only trace, which helps to find graph breaks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode == "none" and "backend" in self.changed:
            refuse([("backend", "is unused: nothing is compiled; remove it or set compile.mode to per_block")])
        return self
