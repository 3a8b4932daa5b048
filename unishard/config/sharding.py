"""What is sharded across the ranks, and in which units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from unishard.config.patterns import Pattern
from unishard.config.relevance import OffAt, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings

ZERO_STAGES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
"""The strategy of each stage of ZeRO."""
_ALIASES = {
    "ddp": "no_shard",
    **{f"zero{stage}": strategy for stage, strategy in enumerate(ZERO_STAGES)},
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

GATHERING = ("full_shard", "hybrid_shard")
"""The strategies that shard parameters."""

_GROUPS = OnlyWith(
    {"strategy": tuple(_WITHIN_GROUP)},
    "the strategy has no groups",
    "is unused with strategy {self.strategy}, which has no groups; remove it or choose hybrid_shard",
)
_SHARDED_PARAMETERS = OnlyWith(
    {"strategy": GATHERING},
    "parameters are not sharded",
    "is unused with strategy {self.strategy}; remove it or choose full_shard",
)
_SHARDS = OnlyWith(
    {"strategy": ("full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "hybrid_shard_grad_op")},
    "nothing is gathered",
    "is unused with strategy no_shard, which gathers nothing; remove it or choose full_shard",
)


def _several(value: Any) -> Any:
    if value == 1 and not isinstance(value, bool):
        raise PydanticCustomError(
            "one", "is 1, and a group of one rank shards nothing; write 2 or more, or strategy: no_shard without it"
        )
    return value


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
    group_size: Annotated[int | None, _GROUPS, BeforeValidator(_several)] = Field(default=None, ge=2)
    """Ranks in one sharding group (`hybrid_shard` and `hybrid_shard_grad_op` only); it must divide the number of ranks.
    Consecutive ranks form a group. `null` for the ranks of one node. A group of all ranks means no replication."""
    reshard_after_forward: Annotated[bool | int, _SHARDED_PARAMETERS] = Field(default=True)
    """Whether a unit's parameters are freed after its forward and gathered again for its backward (`full_shard`
    and `hybrid_shard` only). `false` halves the all-gathers and needs more memory. A number, such as the ranks of one
    node, keeps a shard of the gathered parameters on each of so many ranks, so that backward gathers among these only;
    it must divide the ranks that share one copy."""
    units: Annotated[Literal["auto"] | list[str], _SHARDS] = Field(default="auto")
    """Modules whose parameters are gathered together: class names such as `[LlamaDecoderLayer]`, or `auto` for the
    model's repeated blocks (`_no_split_modules` of a Hugging Face model)."""
    min_unit_params: Annotated[int, OffAt(0), _SHARDS] = Field(default=0, ge=0)
    """Modules with fewer parameters than this are not units."""
    conditional_modules: Annotated[list[str], OffAt([])] = Field(default=[])
    """Classes of modules that a rank may skip in a micro-batch, entirely or partly, such as experts behind a router or
    an image tower. Neither they nor modules inside them are units: they are gathered and reduced with the enclosing
    unit, or with the root if there is none. A rank that does not use one of their parameters contributes zeros to the
    average."""
    replicate: Annotated[list[Pattern], OffAt([])] = Field(default=[])
    """Parameters that every rank holds whole at all times, between the calls of the engine too, such as those of a
    router or of a module whose weight another one reads: regular expressions, matched anywhere in their names. They are
    ordinary tensors in `precision.compute`, nothing gathers them, and a rank may skip them. `no_shard` holds all
    parameters so."""

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

    def _problems(self) -> Iterator[tuple[str, str]]:
        ranks = self.reshard_group
        if ranks is not None and ranks < 2 and (self.strategy in GATHERING or ranks == 1):  # 1 equals the default, true
            yield "reshard_after_forward", f"is {ranks}; write a number of ranks from 2 on, or true or false"
        if self.units == []:
            yield "units", "is empty; name at least one class or write auto"
        if self.units != "auto":
            for name in self.conditional_modules:
                if name in self.units:
                    yield (
                        "conditional_modules",
                        f"{name} is also in units, but a conditional module cannot be a unit; remove it from one of "
                        "the two",
                    )
