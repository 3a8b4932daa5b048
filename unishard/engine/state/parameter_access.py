"""Gradients and parameters by the user's names, with one meaning on every engine.

An engine says which part of a tensor each rank holds; whole tensors, norms and edits are made of these here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.shards import Shard, full_tensor, shard_norms, write_shard
from unishard.errors import ContractError

__all__ = ["ParameterAccess"]


class ParameterAccess(ABC):
    """Reads and edits gradients and master weights. Every public method is collective: call it on all ranks with the same names."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._named = dict(module.named_parameters(remove_duplicate=False))
        """The engine's parameters by the user's names; tied ones under each of theirs."""
        self._settled = False
        self._divisor = 1.0

    # -- what an engine supplies ------------------------------------------------------------------------------------------

    @abstractmethod
    def _finish_gradients(self) -> None:
        """At the end of a window: reduce what is not reduced yet, so that the gradients are those that `_update` will use.

        Called at most once in a window; `_update` must then not reduce again (`self._settled` is true). Collective.
        """

    @abstractmethod
    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """What this rank holds of a finished gradient.

        Args:
            parameter: A trainable one.
            create: Whether a parameter without a gradient gets one of zeros; else the answer is None for it, on every rank.
        """

    @abstractmethod
    def _master_part(self, parameter: nn.Parameter) -> Shard:
        """What this rank holds of a master weight, or of a frozen parameter itself."""

    @abstractmethod
    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """After a master weight was edited: bring every other copy of it, in whatever format, up to `whole` (fp32)."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Forget all gradients of the window, reduced or not, and a forward that no backward followed."""

    @abstractmethod
    def _gradient_divisor(self) -> float:
        """What `_update` will divide the finished gradients by, so that they are in the user's units. Collective."""

    @abstractmethod
    def _require_open(self, call: str) -> None:
        """Raise ContractError on a closed engine."""

    @abstractmethod
    def _enter(self, call: str, detail: str = "") -> None:
        """Raise RankMismatchError on every rank where another one is in another call. Collective."""

    @abstractmethod
    def _require_end_of_window(self, call: str) -> None:
        """Raise ContractError unless the last backward of a window has run, and `step` has not."""

    @abstractmethod
    def _require_no_graph(self, call: str) -> None:
        """Raise ContractError while the graph of a forward waits for its backward."""

    # -- gradients --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def grad(self, name: str) -> Tensor | None:
        """The gradient that the coming update will use: averaged over the window and the ranks, before clipping. Collective.

        Call it between the backward of a window's last micro-batch and `step`.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter has one gradient under all its names.

        Returns:
            A copy, fp32, whole, on `device`; None for a frozen parameter and for one that no rank used.

        Raises:
            ContractError: There is no such parameter, the window is not at its end, or the engine is closed.
        """
        parameter = self._find("grad", name)
        self._settle("grad")
        part = self._gradient_part(parameter, create=False) if parameter.requires_grad else None
        return None if part is None else full_tensor(part, self._device).div_(self._divisor)

    @torch.no_grad()
    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient that the coming update will use; its norm and clipping see the new one. Collective.

        Args:
            name: Name in `module.named_parameters()`, of a trainable parameter.
            value: In units of `grad`, whole, any floating dtype and device. Rank 0's counts; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, it is frozen, `value` does not fit it, the window is not at its end, or
                the engine is closed.
        """
        parameter = self._find("set_grad", name)
        if not parameter.requires_grad:
            raise ContractError(f"set_grad: {name} is frozen, so no update would use its gradient; set requires_grad before prepare")
        self._settle("set_grad")
        part = self._gradient_part(parameter, create=True)
        if part is not None:
            write_shard(part, self._from_first_rank("set_grad", name, part, value).mul_(self._divisor))

    @torch.no_grad()
    def grad_norms(self) -> dict[str, float]:
        """L2 norm of each trainable parameter's gradient, before clipping; the root of their squares' sum is `Step.grad_norm`.

        Collective: one all-reduce of one number for each parameter; nothing is gathered. Call it where `grad` can be called.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name, those without a gradient
            left out.

        Raises:
            ContractError: The window is not at its end, or the engine is closed.
        """
        self._require_end_of_window("grad_norms")
        self._enter("grad_norms")
        self._settle("grad_norms")
        parts = {}
        for name, parameter in self._each():
            part = self._gradient_part(parameter, create=False) if parameter.requires_grad else None
            if part is not None:
                parts[name] = part
        return {name: norm / self._divisor for name, norm in shard_norms(parts, self._device).items()}

    def _settle(self, call: str) -> None:
        self._require_end_of_window(call)
        if not self._settled:
            self._finish_gradients()
            self._divisor = self._gradient_divisor()
            self._settled = True

    # -- parameters -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def parameter(self, name: str) -> Tensor:
        """A master weight, at any time. Collective.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter is there under each of its names.

        Returns:
            A copy, fp32, whole, on `device`; of a frozen parameter what the engine keeps of it, perhaps rounded to
            `precision.compute`.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
        """
        return full_tensor(self._master_part(self._find("parameter", name)), self._device)

    @torch.no_grad()
    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with. Collective.

        Args:
            name: Name in `module.named_parameters()`.
            value: Whole, any floating dtype and device. Rank 0's counts; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, `value` does not fit it, a forward waits for its backward, or the engine
                is closed.
        """
        parameter = self._find("set_parameter", name)
        self._require_no_graph("set_parameter")
        self._replace("set_parameter", name, parameter, value)

    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Edit several master weights: on leaving, what is in the tensors is written back, as `set_parameter` does. Collective.

        Rank 0's edits count. After an exception inside, nothing is written.

        Args:
            names: Names in `module.named_parameters()`. All these parameters are whole at once, in fp32, on every rank.

        Yields:
            Tensors by name, fp32, whole, on `device`; tied names share one. Edit them in place.

        Raises:
            ContractError: There is no such parameter, a tensor was replaced by one that does not fit, a forward waits for its
                backward, or the engine is closed.
        """
        if isinstance(names, str):
            raise ContractError(f"gathered needs a list of names, got {names!r}; write gathered([{names!r}])")
        found = {name: self._find("gathered", name) for name in names}
        self._require_no_graph("gathered")
        wholes: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for parameter in found.values():
                if parameter not in wholes:
                    wholes[parameter] = full_tensor(self._master_part(parameter), self._device)
        tensors = {name: wholes[parameter] for name, parameter in found.items()}
        yield tensors
        self._require_no_graph("gathered")
        if tensors.keys() != found.keys():
            raise ContractError("gathered: names were added to its dict or removed; edit the tensors that are in it")
        edited = {parameter: name for name, parameter in found.items() if tensors[name] is not wholes[parameter]}
        names_of = {parameter: name for name, parameter in found.items()} | edited
        self._enter("gathered", ", writing back")
        with torch.no_grad():
            for parameter, name in names_of.items():
                self._replace("gathered", name, parameter, tensors[name])

    @torch.no_grad()
    def parameter_norms(self) -> dict[str, float]:
        """L2 norm of each master weight, frozen ones too, at any time. Collective: one all-reduce, as `grad_norms`.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name.

        Raises:
            ContractError: The engine is closed.
        """
        self._require_open("parameter_norms")
        self._enter("parameter_norms")
        return shard_norms({name: self._master_part(parameter) for name, parameter in self._each()}, self._device)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _find(self, call: str, name: str) -> nn.Parameter:
        self._require_open(call)
        if name in self._named:
            self._enter(call, f", {name}")
            return self._named[name]
        near = get_close_matches(str(name), self._named, 3) or [known for known in self._named if str(name) in known][:3]
        hint = f"did you mean {' or '.join(near)}?" if near else f"the first of {len(self._named)} are {', '.join([*self._named][:3])}"
        raise ContractError(f"{call}: the model has no parameter {name!r}; {hint}")

    def _each(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under its first name."""
        seen: set[nn.Parameter] = set()
        for name, parameter in self._named.items():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def _from_first_rank(self, call: str, name: str, part: Shard, value: Tensor) -> Tensor:
        """Rank 0's value as a new fp32 tensor. Collective."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ContractError(f"{call}: {name} needs a floating-point tensor, got {kind}")
        if value.shape != part.shape:
            raise ContractError(f"{call}: {name} has the shape {tuple(part.shape)}, got {tuple(value.shape)}")
        fresh = torch.empty(part.shape, dtype=torch.float32, device=self._device).copy_(value)
        if dist.get_world_size() > 1:
            dist.broadcast(fresh, src=0)
        return fresh

    def _replace(self, call: str, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        part = self._master_part(parameter)
        fresh = self._from_first_rank(call, name, part, value)
        write_shard(part, fresh)
        self._refresh(parameter, fresh)
