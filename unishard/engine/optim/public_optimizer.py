"""What users see of an engine's optimizer: groups and state, the same on every engine; the engine makes the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from unishard.contract.adapter import Updates
from unishard.engine.optim.state_by_parameter import StateByParameter
from unishard.engine.optim.stepping import OwnCalls
from unishard.errors import ContractError

_SAVES = "engine.save() saves the optimizer with the model, and engine.load() loads both, on any engine"


class PublicOptimizer(torch.optim.Optimizer):
    """`engine.optimizer`: reads and writes the groups of the engine's optimizer, and refuses what the engine does
    itself.

    A torch optimizer, so that schedulers can be built on it. Other attributes are those of the engine's own optimizer.
    """

    def __init__(self, updates: Updates, own: OwnCalls, require_no_gradients: Callable[[str], None]) -> None:
        """Does not register parameters, as the base class would: they stay those of the engine's optimizer.

        Args:
            updates: Its optimizer's groups hold the live learning rates.
            own: Whether the engine is calling.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
        """
        self._real: Any = updates.optimizer
        self._inner = updates.torch_optimizer
        self._state = StateByParameter(updates)
        self._own = own
        self._require_no_gradients = require_no_gradients
        self.before_reading: Callable[[], None] = lambda: None
        """Called before the groups are read."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the base class has an attribute
        """The live groups; their `lr` is the rate of the next update."""
        self.before_reading()
        groups: list[dict[str, Any]] = self._real.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What this rank holds of each parameter's state, by the model's parameters, on every engine."""
        return self._state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options that the torch optimizer was created with."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name) if hasattr(self._inner, name) else getattr(self._real, name)

    def step(self, closure: Any = None) -> Any:
        """Refuse; the engine calls it after an update for the schedulers built on this object, which expect that."""
        if not self._own.running:
            raise ContractError(
                "engine.optimizer.step() was called, but the engine steps its optimizer; remove the call: "
                "engine.step() updates the parameters, zeroes their gradients and steps the scheduler"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing between two accumulation windows, when there are no gradients; refuse inside one."""
        self._require_no_gradients("engine.optimizer.zero_grad()")

    def state_dict(self) -> NoReturn:
        """Refuse."""
        _refuse("engine.optimizer.state_dict()", "returns only shards of the state")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refuse."""
        _refuse("engine.optimizer.load_state_dict()", "would not reach the engine's shards")

    def add_param_group(self, param_group: Any) -> NoReturn:
        """Refuse."""
        _refuse_group("engine.optimizer.add_param_group()")

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook before the torch optimizer steps."""
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook after the torch optimizer has stepped."""
        return self._inner.register_step_post_hook(hook)

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler was built on this object: torch wraps the `step` of an optimizer for it."""
        return "step" in vars(self)


class GuardedOptimizer:
    """Makes an optimizer that the user holds too refuse what the engine does itself; its steps are refused in
    `stepping`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: OwnCalls,
        require_no_gradients: Callable[[str], None],
        *,
        whole: bool,
        modes: Mapping[str, Any],
    ) -> None:
        """From now on refuse.

        Args:
            optimizer: The user's.
            own: Whether the engine is calling.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
            whole: Whether its state is all there, so that it may be read.
            modes: Its `train` and `eval`, if it has them.
        """
        kind = type(optimizer).__name__
        zero_grad = optimizer.zero_grad

        def guarded_zero_grad(set_to_none: bool = True) -> None:
            if own.running:
                zero_grad(set_to_none)
            else:
                require_no_gradients(f"{kind}.zero_grad()")

        def refuse_group(param_group: Any) -> None:
            _refuse_group(f"{kind}.add_param_group()")

        def before_saving(optimizer: Any) -> None:
            if not whole:
                _refuse(f"{kind}.state_dict()", "returns only shards of the state")

        def before_loading(optimizer: Any, state: Any) -> None:
            _refuse(f"{kind}.load_state_dict()", "would not reach the engine's shards")

        self._attributes: dict[str, Any] = {"zero_grad": guarded_zero_grad, "add_param_group": refuse_group, **modes}
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_state_dict_pre_hook(before_saving),
            optimizer.register_load_state_dict_pre_hook(before_loading),
        ]
        vars(optimizer).update(self._attributes)

    def remove(self) -> None:
        """Give the optimizer its own methods again."""
        for hook in self._hooks:
            hook.remove()
        for name in self._attributes:
            vars(self._optimizer).pop(name, None)


def _refuse(call: str, why: str) -> NoReturn:
    raise ContractError(f"{call} {why}; {_SAVES}")


def _refuse_group(call: str) -> NoReturn:
    raise ContractError(
        f"{call} comes too late: the parameters are sharded; give the optimizer all groups before prepare, and freeze "
        "what trains later with engine.weights.set_trainable(names, False)"
    )
