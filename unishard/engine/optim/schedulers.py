"""Learning rate schedules: closed forms of the number of updates, or a scheduler object of torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unishard.checkpoint.user_state import pack, unpack
from unishard.config import Scheduler
from unishard.contract.checkpoint_format import ScheduleFacts
from unishard.errors import CheckpointError, ConfigError, ContractError, Problem

_SCALE = 10_000
"""Updates over which `inverse_sqrt` falls to the square root of a half, without a warm-up that says it."""


def factor(cfg: Scheduler, updates: int) -> float:
    """Factor of the learning rate after `updates` updates.

    The same closed forms as `get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup` (both with
    `min_lr_ratio` as floor) and `get_inverse_sqrt_schedule` of transformers 5.23; the logarithmic warm-up is that of
    `WarmupLR` and `WarmupDecayLR` in DeepSpeed 0.19.8.
    """
    updates = max(0, updates - cfg.delay_steps)
    if updates < cfg.warmup_steps:
        linear = cfg.warmup_type == "linear"
        climbed = updates / cfg.warmup_steps if linear else math.log(updates + 1) / math.log(cfg.warmup_steps)
        return cfg.warmup_start_ratio + (1.0 - cfg.warmup_start_ratio) * climbed
    if cfg.name == "inverse_sqrt":
        scale = cfg.warmup_steps or _SCALE
        return math.sqrt(scale / (updates - cfg.warmup_steps + scale))
    if cfg.total_steps is None:
        return 1.0
    progress = min(1.0, (updates - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps))
    shape = 1.0 - progress if cfg.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape


class Schedule:
    """Writes learning rates into an optimizer's parameter groups after each update that was not skipped."""

    def __init__(self, cfg: Scheduler, param_groups: list[dict[str, Any]]) -> None:
        self._cfg = cfg
        self._groups = param_groups
        self._peaks = [float(group["lr"]) for group in param_groups]
        self._updates = 0
        self._constant = cfg.name == "constant" and cfg.warmup_steps == 0
        self._write()

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group for the next update."""
        return float(self._groups[0]["lr"])

    @property
    def writes(self) -> bool:
        """Whether updates change the learning rates."""
        return not self._constant

    @property
    def ended(self) -> bool:
        """Whether the coming update is past `total_steps`, with a learning rate that stays 0."""
        cfg = self._cfg
        return (
            cfg.total_steps is not None and not cfg.min_lr_ratio and self._updates - cfg.delay_steps >= cfg.total_steps
        )

    def advance(self) -> None:
        """Move on by one update."""
        self._updates += 1
        self._write()

    can_retreat = True
    """Whether `retreat` works, so that `advance` may be called before it is known whether an update was skipped."""

    def retreat(self) -> None:
        """Take the last `advance` back: the update was skipped."""
        self._updates -= 1
        self._write()

    def close(self) -> None:
        """Do nothing: the groups keep their rates."""

    def facts(self) -> dict[str, Any]:
        """State for a checkpoint: the number of updates, and each group's peak learning rate."""
        return {"updates": self._updates, "peaks": self._peaks}

    def require(self, facts: ScheduleFacts) -> None:
        """Do nothing: every schedule of a checkpoint can be resumed."""

    def resume(self, facts: ScheduleFacts, then: Sequence[Mapping[str, Any]]) -> None:
        """Resume at the update of a checkpoint, on the schedule of the current config.

        Args:
            facts: The schedule in the checkpoint.
            then: The group options in the checkpoint; empty if the groups differ. Their learning rates are used if the
                schedule is constant and had the same peaks, because then only the user can have changed them.
        """
        self._updates = facts.updates
        if self._constant and then and list(facts.peaks) == self._peaks:
            for group, options in zip(self._groups, then, strict=True):
                if options.get("lr") is not None:
                    group["lr"] = float(options["lr"])
        self._write()

    def _write(self) -> None:
        if self._constant:
            return  # keep a learning rate that the user has set
        now = factor(self._cfg, self._updates)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * now


SchedulerFactory = Callable[[Any], Any]
"""Builds an `LRScheduler` from the optimizer that it is given."""


def check(scheduler: LRScheduler | SchedulerFactory, optimizer: object) -> None:
    """Check a scheduler before anything is sharded.

    Args:
        scheduler: A scheduler, or a function that builds one.
        optimizer: The optimizer that was passed.

    Raises:
        ConfigError: It is not a scheduler, needs a metric, or belongs to another optimizer.
    """
    if isinstance(scheduler, LRScheduler):
        _check_kind(scheduler)
        if scheduler.optimizer is not optimizer:
            _refuse(
                f"{type(scheduler).__name__} belongs to an optimizer that was not passed to prepare; pass that "
                "optimizer too, or pass a "
                "function such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
    elif not callable(scheduler):
        _refuse(
            f"is a {type(scheduler).__name__}; pass a torch.optim.lr_scheduler.LRScheduler, or a function that builds "
            "one"
        )


def build_scheduler(build: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """Build a scheduler with the caller's function, and check it.

    Raises:
        ConfigError: It did not return a scheduler, or one that needs a metric or belongs to another optimizer.
    """
    scheduler: object = build(optimizer)
    if not isinstance(scheduler, LRScheduler):
        _refuse(f"function returned {type(scheduler).__name__}; it must return a torch.optim.lr_scheduler.LRScheduler")
    _check_kind(scheduler)
    if scheduler.optimizer is not optimizer:
        _refuse(
            f"function returned a {type(scheduler).__name__} of another optimizer; build it from the function's "
            "argument"
        )
    return scheduler


def _check_kind(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        _refuse(
            "ReduceLROnPlateau needs a metric, which is not available in an update; build it on engine.optimizer after "
            "prepare, leave the config's schedule constant, and call its step(metric) where you compute the metric"
        )


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
        """The state of a scheduler of the same class; None after another schedule."""
        if facts.torch is None or facts.torch.class_name != type(self._scheduler).__name__:
            if self._updates > facts.updates:
                raise CheckpointError(
                    f"{type(self._scheduler).__name__} is at update {self._updates} and cannot go back to "
                    f"{facts.updates}, because the "
                    "checkpoint has another schedule; prepare a new model and load before the first update"
                )
            return None
        state = unpack(facts.torch.state, _no_tensor)
        if not isinstance(state, dict) or not all(
            alike(state[key], now) for key, now in self._scheduler.state_dict().items() if key in state
        ):
            raise CheckpointError(
                f"schedule.torch.state in the manifest is not what {facts.torch.class_name}.state_dict() returned"
            )
        return state

    def resume(self, facts: ScheduleFacts, then: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of a scheduler of the same class; after another schedule, advance to the same number of
        updates.

        Args:
            facts: The schedule in the checkpoint.
            then: The group options in the checkpoint; empty if the groups differ.

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
        self._scheduler.load_state_dict(state)
        written = ("lr", *(_CYCLED if _cycles(self._scheduler) else ()))
        for group, options in zip(self._groups, then, strict=bool(then)):
            for key in written:
                if key in options:
                    group[key] = tuple(options[key]) if isinstance(options[key], list) else options[key]


_LARGEST = 2**62
"""No count, and no rate, is as large."""
_CYCLED = ("momentum", "betas")
"""Options that OneCycleLR and CyclicLR write in addition to the learning rate (torch 2.13, optim/lr_scheduler.py)."""


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


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("scheduler", what)])
