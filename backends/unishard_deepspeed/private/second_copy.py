"""The group and the shards of a second copy of the parameters (hpZ)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def own_group() -> Iterator[None]:
    """A block in which `deepspeed.zero.Init` creates the group of one engine, and after which no other engine sees it.

    DeepSpeed keeps one group in the process, reads it while an engine is built, and asserts that there is none when it
    creates one (utils/groups.py, _create_zero_param_parallel_group).
    """
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    try:
        yield
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def group_of_init(init: Any) -> Any:
    """The group that the first `deepspeed.zero.Init` of a model has created, for the argument of the others."""
    return init.zero_param_process_group


def second_shard(parameter: Any) -> Any:
    """This rank's shard of the second copy; None if there is none now."""
    return getattr(parameter, "ds_secondary_tensor", None)


def drop_second_copies(parameters: Iterable[Any]) -> None:
    """Forget second copies of parameters that were written; the next forward gathers among all ranks and makes them
    anew.

    DeepSpeed does so itself after an update, for trainable parameters (runtime/zero/stage3.py,
    invalidate_secondary_tensor).
    """
    for parameter in parameters:
        if second_shard(parameter) is not None:
            parameter.ds_secondary_tensor = None
