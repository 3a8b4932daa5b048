"""Stage 3: explain why a module whose parameters are replaced by other tensors for a call cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from unishard.contract.kit.tracebacks import modules_in
from unishard.errors import ModelError


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """A block that runs a forward.

    Raises:
        ModelError: A module was called with tensors in place of its parameters, as `torch.func.functional_call` does.
            DeepSpeed takes all for its own parameters (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py,
            _fetch_sub_module_impl).
    """
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, Tensor) or not str(error.name).startswith("ds_"):
            raise
        name = next((name for name, _ in modules_in(error.__traceback__, model)), "")
        raise ModelError(
            f"the forward of {name or 'the model'} was called with other tensors in place of its parameters, as by "
            "torch.func.functional_call, which DeepSpeed cannot do under full_shard; compute the weight with "
            "torch.nn.utils.parametrize.register_parametrization, or set sharding to shard_grad_op"
        ) from error
