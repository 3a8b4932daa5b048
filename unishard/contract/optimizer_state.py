"""Optimizer state of one tensor: find its keys, and create it without an update."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import Shard
from unishard.errors import CheckpointError


class StateSpec(NamedTuple):
    """The optimizer state to create for a tensor."""

    tensors: Mapping[str, torch.dtype]
    """Keys whose tensor has the parameter's shape, such as `exp_avg`."""
    numbers: Mapping[str, float]
    """Keys that are one number, such as `step`."""


class Keys(NamedTuple):
    """The state that an optimizer's first update creates."""

    tensors: Mapping[str, torch.dtype]
    """Keys whose tensor has the parameter's shape."""
    numbers: Mapping[str, Any]
    """Keys that are one number, with their value after that update: a tensor of one element, an int or a float."""
    nothing: frozenset[str]
    """Keys that are None."""


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Keys]] = WeakKeyDictionary()
"""Known keys of each optimizer, by group options and the kind of tensor."""
_MEMORY: WeakKeyDictionary[Any, Callable[[str, Tensor], Tensor | None]] = WeakKeyDictionary()
"""Where the state of each optimizer lies, if not beside what it steps."""
_RATES = ("lr", "initial_lr")
"""Options that change between updates and do not affect the keys."""


def keep_state(optimizer: Any, memory: Callable[[str, Tensor], Tensor | None]) -> None:
    """Let new state of an optimizer lie where a function says, by the key and the tensor that is stepped."""
    _MEMORY[optimizer] = memory


def is_kept(optimizer: Any) -> bool:
    """Whether the state of an optimizer lies where a function says."""
    return optimizer in _MEMORY


def memory_for(optimizer: Any, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a key of the state of a tensor, where the state lies; what is in it may be of a state before."""
    memory = _MEMORY[optimizer](key, like) if optimizer in _MEMORY else None
    return torch.zeros_like(like, dtype=dtype) if memory is None else memory


@torch.no_grad()
def fresh_state(optimizer: Any, group: Mapping[str, Any], like: Tensor, spec: StateSpec) -> dict[str, Any]:
    """Create optimizer state for one tensor: zeros, and the given numbers in the types that this optimizer uses.

    Args:
        optimizer: A torch optimizer; it is not changed.
        group: The parameter group of the tensor.
        like: The tensor that the optimizer steps: a parameter, a DTensor or flat master weights.
        spec: The state to create.

    Raises:
        CheckpointError: This optimizer has no such number, or its state keys cannot be determined.
    """
    keys = keys_of(optimizer, group, like)
    for name in spec.numbers:
        if name not in keys.numbers:
            raise CheckpointError(
                f"the state of {type(optimizer).__name__} has no number {name!r}, only "
                f"{', '.join(keys.numbers) or 'none'}; load it with the optimizer that saved it, or pass strict=False"
            )
    state: dict[str, Any] = dict.fromkeys(keys.nothing)
    state |= {name: memory_for(optimizer, name, like, dtype).zero_() for name, dtype in spec.tensors.items()}
    return state | {name: _like(keys.numbers[name], number) for name, number in spec.numbers.items()}


def keys_of(optimizer: Any, group: Mapping[str, Any], like: Tensor | None = None) -> Keys:
    """Find the keys that the first update of a tensor creates, and their kinds, by stepping a copy of the optimizer.

    Args:
        optimizer: A torch optimizer; neither it nor its groups are changed, and its step hooks are not called.
        group: The parameter group of the tensor.
        like: The tensor that it steps; by default the group's first tensor.

    Raises:
        CheckpointError: A copy of the optimizer cannot step, or its state is neither a number nor in the parameter's
            shape.
    """
    if like is None:
        like = next(iter(group["params"]), torch.empty(1))
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    fixed = sorted((name, repr(value)) for name, value in options.items() if name not in _RATES)
    which, known = (like.device, like.dtype, like.dim(), *fixed), _KNOWN.setdefault(optimizer, {})
    if which not in known:
        # All dimensions differ, so that state per row or column is not mistaken for state in the parameter's shape.
        shape = tuple(range(2, 2 + max(1, like.dim())))
        dummy = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        known[which] = _kinds(optimizer, _first_state(optimizer, options, dummy), dummy.shape)
    return known[which]


def tensors_and_numbers(
    optimizer: Any, group: Mapping[str, Any], like: Tensor, state: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the state of one tensor: tensors of its shape (live memory), and numbers (new 0-d fp32 CPU tensors).

    Args:
        optimizer: A torch optimizer.
        group: The parameter group of the tensor.
        like: The tensor that the optimizer steps.
        state: Its state; empty if it was never updated.

    Raises:
        CheckpointError: The state contains something else.
    """
    if not state:
        return {}, {}
    known = keys_of(optimizer, group, like)  # the shapes are ambiguous for a 0-d parameter
    later = _kinds(
        optimizer,
        {name: value for name, value in state.items() if name not in {*known.tensors, *known.numbers}},
        like.shape,
    )
    kept = {name: value for name, value in state.items() if value is not None}
    tensors = {name: value for name, value in kept.items() if name in known.tensors or name in later.tensors}
    numbers = {name: value for name, value in kept.items() if name not in tensors}
    return tensors, {name: torch.tensor(float(value), dtype=torch.float32) for name, value in numbers.items()}


class OptimizerState(Protocol):
    """What an adapter reads and makes of its optimizer's state."""

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of a parameter's optimizer state, by the optimizer's keys.

        Tensors in the parameter's shape are live memory. A number, such as a step count, is a shard of shape () with an
        fp32 copy in host memory. Empty for a parameter that was never updated, and if this rank holds nothing of it.
        """

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Clear all optimizer state and create it for these parameters: zeros, and the given numbers.

        Optimizers create their state in the first step, so a new engine has none to load into. The parameters that are
        left out have none, as before their first update.
        """


class TorchOptimizerState:
    """An `OptimizerState` of a torch optimizer whose groups have the parameters of the model."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shard_of: Callable[[nn.Parameter], Shard],
        stepped: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Hold the optimizer.

        Args:
            optimizer: The torch optimizer.
            shard_of: This rank's shard of a parameter.
            stepped: The tensors that it steps in place of parameters.
        """
        self._optimizer = optimizer
        self._shard_of = shard_of
        self.stepped = {} if stepped is None else stepped
        self._groups = {tensor: group for group in optimizer.param_groups for tensor in group["params"]}

    @torch.no_grad()
    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """As in `OptimizerState`."""
        state = self._optimizer.state.get(parameter)
        if not state:
            return {}
        like = self.stepped.get(parameter, parameter)
        tensors, numbers = tensors_and_numbers(self._optimizer, self._groups[parameter], like, state)
        place = self._shard_of(parameter)
        shape = place.shape if place.group is None else (-1,)
        own = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in tensors.items()}
        shards = {key: place._replace(values=value.view(shape)) for key, value in own.items()}
        return shards | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    @torch.no_grad()
    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """As in `OptimizerState`."""
        self._optimizer.state.clear()
        for parameter, spec in specs.items():
            like = self.stepped.get(parameter, parameter)
            self._optimizer.state[parameter] = fresh_state(self._optimizer, self._groups[parameter], like, spec)


def _like(example: Any, number: float) -> Any:
    if isinstance(example, Tensor):
        return torch.full_like(example, number)
    return type(example)(number)


def _kinds(optimizer: Any, state: Mapping[str, Any], shape: torch.Size) -> Keys:
    nothing = frozenset(name for name, value in state.items() if value is None)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    numbers = {name: value for name, value in state.items() if name not in tensors and name not in nothing}
    for name, value in numbers.items():
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)):
            description = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise CheckpointError(
                f"the state {name!r} of {type(optimizer).__name__} is {description}, neither in the parameter's shape "
                "nor one number, so it cannot be sharded with the parameter; use an optimizer with element-wise state, "
                "such as AdamW"
            )
    return Keys({name: value.dtype for name, value in tensors.items()}, numbers, nothing)


@torch.no_grad()
def _first_state(optimizer: Any, options: Mapping[str, Any], dummy: nn.Parameter) -> dict[str, Any]:
    """Step a copy of the optimizer on a parameter with a zero gradient, and return its state."""
    if isinstance(optimizer, ShardOptimizer):  # a step may be collective
        return optimizer.first_state(options, dummy)
    kind = type(optimizer)
    dummy.grad = torch.zeros_like(dummy)
    own = object.__new__(kind)
    vars(own).update({name: _copied(value) for name, value in vars(optimizer).items()})
    vars(own).update(param_groups=[{**copy.deepcopy(dict(options)), "params": [dummy]}], state=defaultdict(dict))
    vars(own).pop("step", None)  # a scheduler has set a `step` that is bound to `optimizer`
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # torch 2.13, optim/optimizer.py
        vars(own)[name] = OrderedDict()
    try:
        with torch.random.fork_rng([dummy.device] if dummy.is_cuda else []):  # some optimizers draw random numbers
            own.step()
    except Exception as error:  # whatever the user's own class raises
        raise CheckpointError(
            f"the state keys of {kind.__name__} cannot be determined: step() of a copy fails with "
            f"{type(error).__name__}: {error}; make step() work without arguments, from param_groups only"
        ) from error
    finally:
        # Some optimizers free in __del__ what the copy shares with the original (DeepSpeed 0.19.8,
        # ops/adam/cpu_adam.py).
        own.__class__ = torch.optim.Optimizer
    return dict(own.state[dummy])


def _copied(value: Any) -> Any:
    """Copy an attribute, so that the copied optimizer may change it in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
