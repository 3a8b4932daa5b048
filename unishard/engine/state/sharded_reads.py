"""Say what to write where a script computes with a weight of which this rank has only a shard."""

from __future__ import annotations

from unishard.contract.adapter import ShardedModel
from unishard.errors import ModelError, UnishardError


def refuse_sharded_read(adapter: ShardedModel, error: Exception) -> None:
    """Raise ModelError, which says what to write, in place of the error of an operation on a sharded weight."""
    why = explain_sharded_read(adapter, error)
    if why is not None:
        raise ModelError(why) from error


def explain_sharded_read(adapter: ShardedModel, error: BaseException | None) -> str | None:
    """What to write where a weight was read outside its module; None for other errors."""
    if isinstance(error, UnishardError) or not isinstance(error, RuntimeError):
        return None
    helps = adapter.reads_shard(error)
    if helps is None:
        return None
    why = str(error).partition("\n")[0]
    return (
        f"a weight is used outside the forward of its module, where a rank has only a shard of it ({why}); put the "
        "forward and the backward into a block `with engine.weights.unsharded([name, ...]):` with the names of such "
        "weights, or read one with engine.weights.read(name), and norms with "
        f"engine.weights.norms(){helps and f'; {helps}'}"
    )
