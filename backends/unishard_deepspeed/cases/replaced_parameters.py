"""Stage 3: explain why a module whose parameters are replaced by other tensors for a call cannot run."""

from __future__ import annotations

from torch import Tensor, nn

from unishard.contract.kit.tracebacks import modules_in
from unishard.errors import ModelError

_OF_TRANSFORMS = ("to use it with forward mode AD", "You tried to vmap over", "functorch/ADInterpreters.cpp")
"""In torch 2.13's errors for an autograd function inside a transform that it does not support."""


def explain(error: AttributeError | RuntimeError, model: nn.Module) -> None:
    """Explain an error of a forward, if it is one of these.

    Raises:
        ModelError: A transform of `torch.func` runs through modules, or one was called with tensors in place of its
            parameters, as `torch.func.functional_call` does. DeepSpeed takes all for its own parameters (DeepSpeed
            0.19.8, runtime/zero/partitioned_param_coordinator.py, _fetch_sub_module_impl).
    """
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_TRANSFORMS):
        raise ModelError(
            "the forward applies a transform of torch.func, such as jvp, vmap or grad, to modules whose parameters "
            "DeepSpeed gathers under full_shard, by functions that have none; set sharding to shard_grad_op, or "
            "backend: fsdp"
        ) from error
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor) and str(error.name).startswith("ds_"):
        name = next((name for name, _ in modules_in(error.__traceback__, model)), "")
        raise ModelError(
            f"the forward of {name or 'the model'} was called with other tensors in place of its parameters, as by "
            "torch.func.functional_call, which DeepSpeed cannot do under full_shard; compute the weight with "
            "torch.nn.utils.parametrize.register_parametrization, or set sharding to shard_grad_op"
        ) from error
