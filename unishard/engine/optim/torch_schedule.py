"""A scheduler object of torch as the schedule of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from unishard.checkpoint.user_state import pack, unpack
from unishard.contract.training_facts import ScheduleFacts
from unishard.engine.optim.compute_groups import BY_GROUP
from unishard.engine.optim.saved_groups import SavedGroups
from unishard.errors import CheckpointError, ContractError


class TorchSchedule:
    """Steps a torch scheduler once for each real update."""

    def __init__(self, scheduler: LRScheduler, param_groups: list[dict[str, Any]]) -> None:
        """As `Schedule`.

        Args:
            scheduler: Its optimizer's param_groups hold the same dicts as `param_groups`.
            param_groups: Those of the optimizer that steps.
        """
        self._scheduler = scheduler
        self._groups = param_groups
        self._updates = 0
        self._own_class, self._step = type(scheduler), scheduler.step
        # Not an attribute of the scheduler, which torch would save with its state.
        scheduler.__class__ = type(self._own_class.__name__, (self._own_class,), {"step": _refuse_step})

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the next update."""
        return float(self._groups[0]["lr"])

    @property
    def writes(self) -> bool:
        """Whether updates change the learning rates."""
        return True

    ended = False
    """Whether all later updates have a learning rate of 0: not known of a user's scheduler."""

    def advance(self) -> None:
        """Step the scheduler after an update."""
        self._updates += 1
        self._step()
        for group in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()

    can_retreat = False
    """torch's schedulers only go forward."""

    def retreat(self) -> NoReturn:
        """Refuse."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the scheduler its own `step` again."""
        self._scheduler.__class__ = self._own_class

    def facts(self) -> dict[str, Any]:
        """State for a checkpoint: the number of updates, and the scheduler's own state.

        Raises:
            CheckpointError: The state contains something that JSON cannot represent.
        """
        try:
            state, tensors = pack(self._scheduler.state_dict())
        except CheckpointError as problem:
            raise CheckpointError(f"{type(self._scheduler).__name__} cannot be saved: {problem}") from problem
        if tensors:
            raise CheckpointError(
                f"the state of {type(self._scheduler).__name__} contains tensors, which unishard does not save"
            )
        return {"updates": self._updates, "torch": {"class_name": type(self._scheduler).__name__, "state": state}}

    def require(self, facts: ScheduleFacts) -> None:
        """Check that `resume` can resume.

        Raises:
            CheckpointError: The checkpoint has another schedule, and this one is at a later update; or its state is
                damaged.
        """
        self._state_of(facts)

    def _state_of(self, facts: ScheduleFacts) -> dict[str, Any] | None:
        """The state of a scheduler of the same class, made of as many; None after another schedule."""
        own, state = self._scheduler.state_dict(), None
        if facts.torch is not None and facts.torch.class_name == type(self._scheduler).__name__:
            state = unpack(facts.torch.state, _no_tensor)
        if state is None or (isinstance(state, dict) and _count(state) != _count(own)):
            if self._updates > facts.updates:
                raise CheckpointError(
                    f"{type(self._scheduler).__name__} is at update {self._updates} and cannot go back to "
                    f"{facts.updates}, because the "
                    "checkpoint has another schedule; prepare a new model and load before the first update"
                )
            return None
        if not isinstance(state, dict) or not all(alike(state[key], now) for key, now in own.items() if key in state):
            raise CheckpointError(
                "schedule.torch.state in the manifest is not what "
                f"{type(self._scheduler).__name__}.state_dict() returned"
            )
        return state

    def resume(self, facts: ScheduleFacts, groups: SavedGroups | None) -> None:
        """Load the state of a scheduler of the same class; after another schedule, advance to the same number of
        updates.

        Args:
            facts: The schedule in the checkpoint.
            groups: Of the checkpoint; None if they differ.

        Raises:
            CheckpointError: See `require`.
        """
        state = self._state_of(facts)
        if state is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about scheduler steps without optimizer steps
                for _ in range(facts.updates - self._updates):
                    self.advance()
            return
        self._updates = facts.updates
        self._scheduler.load_state_dict(_by_groups(state, self._scheduler.state_dict(), groups))
        written = ("lr", *(_CYCLED if _cycles(self._scheduler) else ()))
        for group, options in zip(self._groups, groups.options, strict=True) if groups else ():
            for key in written:
                if key in options:
                    group[key] = tuple(options[key]) if isinstance(options[key], list) else options[key]


_LARGEST = 2**62
"""No count, and no rate, is as large."""
_CYCLED = ("momentum", "betas")
"""Options that OneCycleLR and CyclicLR write in addition to the learning rate (torch 2.13, optim/lr_scheduler.py)."""


def _count(state: Mapping[str, Any]) -> int:
    """How many schedulers a state is of."""
    inside = state.get("_schedulers")
    return len(inside) if isinstance(inside, list | tuple) else 0


def _by_groups(saved: Mapping[str, Any], now: Mapping[str, Any], groups: SavedGroups | None) -> dict[str, Any]:
    """The saved state of a scheduler, with what it has for each group in the order of the groups now; as it is now
    where the groups differ.
    """
    state = dict(saved)
    for key in BY_GROUP & now.keys() & saved.keys():
        if isinstance(saved[key], list):
            moved = saved[key] if groups and groups.in_order else groups and groups.of(saved[key])
            state[key] = moved if moved and len(moved) == len(now[key]) else now[key]
    if isinstance(saved.get("_schedulers"), list):
        inside = zip(saved["_schedulers"], now["_schedulers"], strict=True)
        state["_schedulers"] = [_by_groups(then, own, groups) for then, own in inside]
    return state


def alike(saved: object, now: object) -> bool:
    """Whether a saved value can replace one of now: False for anything but numbers where there are numbers now."""
    if saved is None:
        return True
    if isinstance(now, list | tuple) and now:
        return isinstance(saved, list | tuple) and all(alike(each, now[0]) for each in saved)
    if isinstance(now, bool) or not isinstance(now, int | float):
        return True
    return isinstance(saved, float) or (isinstance(saved, int) and abs(saved) < _LARGEST)


def _cycles(scheduler: Any) -> bool:
    """Whether this scheduler, or one that it combines, writes those options."""
    return getattr(scheduler, "cycle_momentum", False) or any(map(_cycles, getattr(scheduler, "_schedulers", ())))


def _refuse_step(scheduler: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ContractError(
        f"{type(scheduler).__name__}.step() was called, but the engine steps this scheduler; remove the call: "
        "engine.step() moves the learning rate once after each update that was not skipped"
    )


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError(
        f"the scheduler's state refers to a tensor {name} that was not saved; the manifest is damaged"
    )
