"""What users see of an engine's optimizer: groups and state, the same on every engine; the engine makes the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unishard.contract.adapter import EngineAdapter
from unishard.errors import ContractError

# -- Refuse steps of optimizers over a prepared model's parameters that are not the engine's own ---


class OwnCalls:
    """Whether the engine calls its optimizer, and not the user's code."""

    def __init__(self) -> None:
        self.running = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block in which calls of the optimizer are the engine's."""
        self.running = True
        try:
            yield
        finally:
            self.running = False


_MARK = "_unishard_model"
"""An attribute of parameters: the number of the model that was prepared. Sharding keeps attributes, also on the
parameters it replaces."""

_trained: dict[int, str] = {}
"""The class of each model that an open engine trains."""

_own: WeakKeyDictionary[torch.optim.Optimizer, OwnCalls] = WeakKeyDictionary()
"""The optimizers that engines step, and who calls them."""

_admitted: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()
"""Other optimizers: how many models were prepared, and how many groups they had, when their parameters were looked
at."""

_numbers = count(1)
_prepared = 0
"""How many models have been prepared for training."""


def mark(model: nn.Module) -> None:
    """Mark the parameters of a model before it is sharded."""
    number = next(_numbers)
    for parameter in model.parameters():
        setattr(parameter, _MARK, number)


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to a model that was prepared for training."""
    return hasattr(parameter, _MARK)


def same_model(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters belong to one model that was prepared for training, before or after it was sharded."""
    return getattr(one, _MARK, None) == getattr(other, _MARK, 0)


def watch(model: nn.Module, class_name: str, optimizers: Iterable[Any], own: OwnCalls) -> int:
    """From now on let only the engine step a marked model's parameters, before or after sharding, and only with these
    optimizers.

    Args:
        model: A prepared model.
        class_name: Its class before it was sharded.
        optimizers: Those that the engine steps; others than torch's are ignored.
        own: Whether the engine is calling them.

    Returns:
        A number for `forget`.
    """
    global _prepared
    if not _prepared:
        register_optimizer_step_pre_hook(_before_step)
    _prepared += 1
    number = next((number for parameter in model.parameters() if (number := getattr(parameter, _MARK, 0))), 0) or next(
        _numbers
    )
    for parameter in model.parameters():
        setattr(parameter, _MARK, number)
    _trained[number] = class_name
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            _own[optimizer] = own
    return number


def forget(number: int, own: OwnCalls) -> None:
    """Watch a model and its optimizers no longer."""
    _trained.pop(number, None)
    for optimizer in [optimizer for optimizer, caller in _own.items() if caller is own]:
        del _own[optimizer]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of torch before the step of any optimizer: microseconds, but for the first step of one that is not an
    engine's.
    """
    own = _own.get(optimizer)
    if own is not None:
        if not own.running:
            raise ContractError(
                f"{type(optimizer).__name__}.step() was called, but the engine steps this optimizer; remove the call: "
                "engine.step() updates the parameters, zeroes their gradients and steps the scheduler"
            )
        return
    seen = _prepared, len(optimizer.param_groups)
    if _admitted.get(optimizer) != seen:
        _require_other_parameters(optimizer)
        _admitted[optimizer] = seen


def _require_other_parameters(optimizer: torch.optim.Optimizer) -> None:
    marks = [getattr(parameter, _MARK, 0) for group in optimizer.param_groups for parameter in group["params"]]
    for number in set(marks) & _trained.keys():
        raise ContractError(
            f"{type(optimizer).__name__}.step() was called on {marks.count(number)} parameters of the "
            f"{_trained[number]} that unishard.prepare has prepared without it, so it would train nothing, or bypass "
            "the engine; create it before prepare and pass it, as in unishard.prepare(model, cfg, "
            "optimizer=optimizer), or remove it: engine.step() updates the parameters"
        )


_SAVES = "engine.save() saves the optimizer with the model, and engine.load() loads both, on any engine"


class PublicOptimizer(torch.optim.Optimizer):
    """`engine.optimizer`: reads and writes the groups of the engine's optimizer, and refuses what the engine does
    itself.

    A torch optimizer, so that schedulers can be built on it. Other attributes are those of the engine's own optimizer.
    """

    def __init__(
        self, real: Any, inner: torch.optim.Optimizer, own: OwnCalls, require_no_gradients: Callable[[str], None]
    ) -> None:
        """Does not register parameters, as the base class would: they stay those of the engine's optimizer.

        Args:
            real: The engine's optimizer, whose groups hold the live learning rates.
            inner: The torch optimizer that makes the updates.
            own: Whether the engine is calling.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
        """
        self._real = real
        self._inner = inner
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
        """The state of the torch optimizer, of this rank's shards."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options that the torch optimizer was created with."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._real, name)

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
    ) -> None:
        """From now on refuse.

        Args:
            optimizer: The user's.
            own: Whether the engine is calling.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
            whole: Whether its state is all there, so that it may be read.
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

        self._attributes: dict[str, Any] = {"zero_grad": guarded_zero_grad, "add_param_group": refuse_group}
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


# -- Who calls an engine's optimizer: the engine; calls of others are refused, or do nothing where they do no harm --


class OptimizerCalls:
    """Separates the engine's calls of its optimizer from those of others, which act differently on each engine, or on
    none.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        built: torch.optim.Optimizer,
        model_class: str,
        require_no_gradients: Callable[[str], None],
        *,
        whole: bool,
    ) -> None:
        """From now on refuse the calls of others.

        Args:
            adapter: The sharded model and its optimizer.
            built: The optimizer that was passed to `prepare` or built for it; the user may hold it.
            model_class: Class of the model before it was sharded.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
            whole: Whether this rank has all of the optimizer's state.
        """
        self._own = own = OwnCalls()
        self.public = PublicOptimizer(adapter.optimizer, adapter.torch_optimizer, own, require_no_gradients)
        """`engine.optimizer`."""
        self._guarded = GuardedOptimizer(built, own, require_no_gradients, whole=whole)
        self._number = watch(adapter.module, model_class, (built, adapter.optimizer, adapter.torch_optimizer), own)

    def own(self) -> AbstractContextManager[None]:
        """A block in which the engine calls its optimizer."""
        return self._own.run()

    def require_one_schedule(self, *, writes: bool) -> None:
        """Check before an update that only one schedule writes the learning rates.

        Args:
            writes: Whether the engine's schedule does.

        Raises:
            ContractError: So does one that was built on `engine.optimizer`.
        """
        if writes and self.public.scheduled:
            raise ContractError(
                "a scheduler was built on engine.optimizer, but the engine's own schedule writes the learning rates "
                "after each update; use only one: remove `scheduler` from the config, or pass a function that builds "
                "yours, as in unishard.prepare(model, cfg, scheduler=lambda optimizer: ...)"
            )

    def updated(self) -> None:
        """Tell schedulers that were built on `engine.optimizer` of an update; they warn if there was none."""
        if self.public.scheduled:
            with self._own.run():
                self.public.step()

    def close(self) -> None:
        """Refuse nothing any longer."""
        self._guarded.remove()
        forget(self._number, self._own)
