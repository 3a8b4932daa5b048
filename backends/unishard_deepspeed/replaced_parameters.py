"""Stage 3: explain why a module whose parameters are replaced by other tensors for a call cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from unishard.contract.kit.tracebacks import modules_in
from unishard.errors import ModelError

_OF_TRANSFORMS = ("to use it with forward mode AD", "You tried to vmap over", "functorch/ADInterpreters.cpp")
"""In torch 2.13's errors for an autograd function inside a transform that it does not support."""


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """A block that runs a forward.

    Raises:
        ModelError: A transform of `torch.func` runs through modules, or one was called with tensors in place of its
            parameters, as `torch.func.functional_call` does. DeepSpeed takes all for its own parameters (DeepSpeed
            0.19.8, runtime/zero/partitioned_param_coordinator.py, _fetch_sub_module_impl).
    """
    try:
        yield
    except RuntimeError as error:  # also NotImplementedError
        if not any(text in str(error) for text in _OF_TRANSFORMS):
            raise
        raise ModelError(
            "the forward applies a transform of torch.func, such as jvp, vmap or grad, to modules whose parameters "
            "DeepSpeed gathers under full_shard, by functions that have none; set sharding to shard_grad_op, or "
            "backend: fsdp"
        ) from error
    except AttributeError as error:
        if not isinstance(error.obj, Tensor) or not str(error.name).startswith("ds_"):
            raise
        name = next((name for name, _ in modules_in(error.__traceback__, model)), "")
        raise ModelError(
            f"the forward of {name or 'the model'} was called with other tensors in place of its parameters, as by "
            "torch.func.functional_call, which DeepSpeed cannot do under full_shard; compute the weight with "
            "torch.nn.utils.parametrize.register_parametrization, or set sharding to shard_grad_op"
        ) from error
