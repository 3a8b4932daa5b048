"""Keys of axolotl about the model, the data and the logs, in groups (axolotl 0.18.0, src/axolotl/utils/schemas and
integrations).
"""

from __future__ import annotations

from collections.abc import Mapping

from unishard.contract.entries import Key
from unishard.contract.key_rows import refuses
from unishard.formats.hf.loop import off
from unishard.formats.names import ignored

__all__ = ["IGNORED"]

_GROUPED = "gives some parameters another rate; make parameter groups of it"
_RESTARTS = "restarts the schedule during training; build the scheduler in the training script"
_PARALLEL = "parallelism within a model is not supported; write 1 and use more ranks"


def _is_one(value: object) -> bool:
    return off(value) or value == 1


IGNORED: Mapping[str, Key] = {
    **ignored("axolotl/ignored.txt"),
    "embedding_lr": refuses(_GROUPED, off),
    "embedding_lr_scale": refuses(_GROUPED, off),
    "lr_groups": refuses(_GROUPED, off),
    "loraplus_lr_ratio": refuses(_GROUPED, off),
    "loraplus_lr_embedding": refuses(_GROUPED, off),
    "jagged_restart_steps": refuses(_RESTARTS, off),
    "relora": refuses(_RESTARTS, off),
    "relora_steps": refuses(_RESTARTS, off),
    "lr_quadratic_warmup": refuses("a quadratic warmup is not supported; build the scheduler in the script", off),
    "fp8": refuses("fp8 is not supported; write bf16", off),
    "tensor_parallel_size": refuses(_PARALLEL, _is_one),
    "context_parallel_size": refuses(_PARALLEL, _is_one),
    "sequence_parallel_degree": refuses(_PARALLEL, _is_one),
    "expert_parallel_size": refuses(_PARALLEL, _is_one),
}
"""Keys that a config of the training does not need, and some that it cannot say."""
