"""What is trained: a framework, on an engine and under a strategy that it has itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.peers.cell import CLIP, Cell, Size

__all__ = ["CASES", "FRAMEWORKS", "SIDES", "Case", "config"]

SIDES = ("own", "unishard")
FRAMEWORKS = ("accelerate", "trainer", "lightning", "fabric")
SMALL = Size(128, 352, 4, 4, 1024, 2, 32, 2, 1)
"""1.2 million parameters: a step takes some tens of milliseconds on one core a rank."""


class Case(Cell):
    """One comparison: `model` is the framework's name."""

    @property
    def size(self) -> Size:
        """The same of all."""
        return SMALL

    def units(self, model: nn.Module) -> list[nn.Module]:
        """What FSDP2 shards one by one, inside the model: what unishard's default and Accelerate's are, too."""
        return [*model.model.layers]


_DDP, _FSDP2 = [("fsdp", "no_shard")], [("fsdp", "full_shard"), ("fsdp", "shard_grad_op")]
_ZERO = [("deepspeed", "full_shard"), ("deepspeed", "shard_grad_op")]
_OWN = {
    "accelerate": [*_DDP, *_FSDP2, *_ZERO],
    "trainer": [*_DDP, *_FSDP2, *_ZERO],
    "lightning": [*_DDP, *_FSDP2],
    "fabric": [*_DDP, *_FSDP2],
}
"""What each framework runs on CPU ranks itself; Lightning's strategy for DeepSpeed takes only CUDA devices."""
CASES = tuple(
    Case(engine, strategy, "fp32", framework) for framework, cells in _OWN.items() for engine, strategy in cells
)


def config(case: Case, *, clips: bool = False) -> dict[str, Any]:
    """unishard's; the rest is the framework's to say.

    Under accumulation the frameworks have FSDP2 reduce gradients once in an update, and so does the other side.
    """
    training = {"micro_batch_size": case.size.batch} | ({"gradient_clipping": CLIP} if clips else {})
    once = {"fsdp": {"requires_gradient_sync": "last_micro_batch"}}
    native = {"native": once} if (case.engine, case.strategy) in _FSDP2 else {}
    return {"backend": case.engine, "sharding": case.strategy, "training": training, **native}
