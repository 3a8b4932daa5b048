"""Which memory DeepSpeed lets the torch optimizer step: all groups at once, one after another, or parts of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from unishard.distributed.shards import SteppedShard
from unishard_deepspeed.flat_master_weights import FlatMasterWeights, FlatShard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind


def stepped_memory(
    inner: InnerOptimizer, masters: FlatMasterWeights, kind: Kind
) -> Callable[[], dict[nn.Parameter, SteppedShard]]:
    """As in `EngineAdapter`.

    Stages 1 and 2 keep only the group that steps in the optimizer, of which a rank's flat master weight may have no
    element of some parameters. Stage 3 keeps all groups, and fills one with a part of it, a shard of each parameter
    there (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, _optimizer_step).
    """
    places: dict[nn.Parameter, tuple[Tensor, FlatShard]] = {
        shard.parameter: (master, shard) for master, shards in masters.shards.items() for shard in shards
    }
    nowhere = SteppedShard(next(iter(masters.shards)).new_empty(0))

    def stepping() -> Iterator[nn.Parameter]:
        if kind == "stage-3":
            for master in masters.stepping():
                yield from (shard.parameter for shard in masters.shards[master])
        else:
            for group in inner.optimizer.param_groups:
                yield from inner.of_group[id(group)]

    def now() -> dict[nn.Parameter, SteppedShard]:
        found = {
            parameter: SteppedShard(*masters.stepped_tensor(*places[parameter])) if parameter in places else nowhere
            for parameter in stepping()
            if parameter not in masters.unused
        }
        if kind == "stage-0":  # the gradients of a skipped update are taken away
            return {parameter: shard for parameter, shard in found.items() if shard.tensor.grad is not None}
        return found

    return now
