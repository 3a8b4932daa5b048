"""Lets a torch optimizer update only those parts of ZeRO's flat masters whose parameters have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["FlatMasterWeights", "FlatShard"]


class FlatShard(NamedTuple):
    """Where a parameter lies in a master."""

    parameter: nn.Parameter
    """The module's."""
    start: int
    """First element in the flat master."""
    numel: int
    """Elements of it in this rank's part."""


class FlatMasterWeights:
    """Swaps, during `optimizer.step`, a flat master for views of the pieces that are to move.

    A flat master has one step count and one set of moments, so it can only move as a whole. It is split when for the first time
    some of its parameters are to move without the others, and stays so: each piece then has a step count of its own, and moments
    that are views of the flat ones, where DeepSpeed and everyone else go on to find them. A flat master that always moves as a
    whole, or not at all, is never split and costs nothing.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, find: Callable[[], Mapping[Tensor, Sequence[FlatShard]]], settle: Callable[[], None]
    ) -> None:
        """Watch an optimizer.

        Args:
            optimizer: Its groups hold the masters while it steps.
            find: Says what each master consists of; padding is in no piece. Called when a parameter stays for the first time.
            settle: Called when the optimizer is about to step: `left_out` must be known then.
        """
        self.left_out: set[Tensor] = set()
        """Parameters that the next step does not move."""
        self._optimizer = optimizer
        self._find = find
        self._settle = settle
        self._split: dict[Tensor, list[tuple[FlatShard, Tensor]]] = {}
        self._stepping: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    @cached_property
    def pieces(self) -> Mapping[Tensor, Sequence[FlatShard]]:
        """What each master on this rank consists of."""
        return self._find()

    def remove(self) -> None:
        """Let go of the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def stepped(self, master: Tensor, piece: FlatShard) -> tuple[Tensor, int]:
        """The tensor that the optimizer steps and keeps state of, and where a piece lies in it: the master, or a view of it."""
        for each, view in self._split.get(master, ()):
            if each is piece:
                return view, 0
        return master, piece.start

    def forget(self) -> None:
        """Forget all state; every master is whole again."""
        self._split.clear()
        self._optimizer.state.clear()

    def split(self, master: Tensor) -> list[Tensor]:
        """Let each piece have a state of its own from now on: views of the pieces, in their order."""
        self._split[master] = [(piece, self._view(master, piece)) for piece in self.pieces[master]]
        return [view for _, view in self._split[master]]

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._settle()
        if not self.left_out and not self._split:
            return
        for group in optimizer.param_groups:
            self._stepping.append((group, group["params"]))
            group["params"] = [part for master in group["params"] for part in self._moving(master)]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, masters in self._stepping:
            group["params"] = masters
            for master in masters:
                self.gather_state(master)
        self._stepping.clear()

    def _moving(self, master: Tensor) -> list[Tensor]:
        pieces = self.pieces.get(master, ())
        staying = [piece for piece in pieces if piece.parameter in self.left_out]
        if pieces and len(staying) == len(pieces):
            return []
        if staying and master not in self._split:
            self.split(master)
        if master not in self._split:
            return [master]
        moving = [(piece, view) for piece, view in self._split[master] if piece.parameter not in self.left_out]
        for piece, view in moving:
            view.grad = None if master.grad is None else master.grad.narrow(0, piece.start, piece.numel)
        return [view for _, view in moving]

    def _view(self, master: Tensor, piece: FlatShard) -> Tensor:
        """A piece with the state that it has had as a part of the whole."""
        view = master.detach().narrow(0, piece.start, piece.numel)
        for key, value in self._optimizer.state.get(master, {}).items():
            if not isinstance(value, Tensor):
                self._optimizer.state[view][key] = value
            elif value.shape == master.shape:
                self._optimizer.state[view][key] = value.narrow(0, piece.start, piece.numel)
            else:
                self._optimizer.state[view][key] = value.clone()
        return view

    def gather_state(self, master: Tensor) -> None:
        """Move what the step has made for single pieces into tensors for the whole, of which they get views."""
        for piece, view in self._split.get(master, ()):
            view.grad = None
            whole = self._optimizer.state[master]
            for key, value in self._optimizer.state.get(view, {}).items():
                if not isinstance(value, Tensor) or value.shape != view.shape:
                    whole[key] = value  # a step count, say; the whole has none of its own
                    continue
                if key not in whole:
                    whole[key] = torch.zeros(master.shape, dtype=value.dtype, device=value.device)
                part = whole[key].narrow(0, piece.start, piece.numel)
                if part.data_ptr() != value.data_ptr():
                    self._optimizer.state[view][key] = part.copy_(value)
