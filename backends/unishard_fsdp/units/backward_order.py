"""The order in which the modules of a forward are gathered and reduced in its backward.

FSDP2 gathers a module when the gradient of a tensor in its output arrives, which it looks for in lists, tuples, dicts
and dataclasses (torch 2.13, fsdp/_common_utils.py, collect_grad_tensors). A tensor that leaves it otherwise, in a list
of the caller, an attribute or an object, may be the only one with a gradient, or have its gradient first: its backward
would read memory that was freed, and no gradient would be reduced.

So each module takes an empty tensor, the token, as one more input, and returns it as one more output. autograd runs
what was computed last first, so of a module's outputs the token, which is made last, has its gradient first.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.nested_tensors import tensors_in


class Pass:
    """A forward of the root, or of a unit that is called without it."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        """Of autograd's graph, one at the beginning of each unit: a loss that goes through the forward reaches some."""
        self.token: Tensor | None = None
        """With its gradient the backward of this forward begins."""
        self.reached = False
        """Whether a backward has gone through it, which may have freed its graph."""

    def reach(self, gradient: Tensor) -> None:
        """Note that a backward goes through the forward's output."""
        self.reached = True


class BackwardOrder:
    """Hands the token from module to module, and adds its backward to that of a loss."""

    def __init__(self, root: nn.Module, device: torch.device, *, differs: bool) -> None:
        self._root = root
        self.differs = differs
        """Whether ranks may run other modules: a frozen one behind them is gathered on all, also if nothing before it
        trains on this rank."""
        self._first = torch.empty(0, device=device, requires_grad=True)
        self.token: Tensor | None = None
        """As the module that runs has taken it, or the one before has returned it; None outside a forward."""
        self.outermost: nn.Module | None = None
        """The first module that was called."""
        self._last = Pass()
        """The last forward, whose output may be dropped while a tensor in it is used."""
        self._passes: list[weakref.ref[Pass]] = []
        """Earlier ones live as long as their outputs: a token holds the graph."""
        self._in_backward = False

    def enter(self, module: nn.Module) -> Tensor | None:
        """The token that a module takes; None where it takes none.

        The outermost module takes none, so that it is reduced at the end of the backward: a script may have read its
        parameters before its forward.
        """
        if self._in_backward or not torch.is_grad_enabled():  # a recomputed forward has its token already
            return None
        if self.outermost is None or module is self._root:
            self.outermost, self.token, self._last = module, self._first, Pass()
            return None
        return self.token

    def take(self, token: Tensor) -> None:
        """Note the token that a module has taken, behind the function with which FSDP2 reduces the module."""
        self.token = token
        self._last.nodes.append(token.grad_fn)

    def leave(self, output: Any) -> None:
        """Note the output of the outermost module."""
        if self.token is not None:
            self._last.token = self.token
            self._passes = [*(each for each in self._passes if each() is not None), weakref.ref(self._last)]
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._last.reach)  # type: ignore[no-untyped-call]
        self.outermost = self.token = None

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss, and that of the tokens of the forwards that it goes through.

        The graphs of others are not to be freed, or are already, by the backward of another engine.
        """
        alive = [each for ref in self._passes if (each := ref()) is not None]
        sent = _reached_by(loss, alive) if len(alive) > 1 or any(each.reached for each in alive) else alive
        tokens = [each.token for each in sent if each.token is not None]
        self._in_backward, self.outermost, self.token = True, None, None
        try:
            torch.autograd.backward([loss, *tokens], [None, *map(torch.zeros_like, tokens)])
        finally:
            self._in_backward = False
        self._passes = [weakref.ref(each) for each in alive if each not in sent]

    def forget(self) -> None:
        """Forget all forwards."""
        self.token = self.outermost = None
        self._last, self._passes = Pass(), []


def _reached_by(loss: Tensor, passes: list[Pass]) -> list[Pass]:
    """The forwards that a loss goes through, and those without units, whose tokens have no graph."""
    owners = {node: each for each in passes for node in each.nodes}
    missing = {*owners.values()}
    waiting, seen = deque([loss.grad_fn]), set[Any]()
    while waiting and missing:  # those nearest to the loss first: an output that belongs to it is soon found
        node = waiting.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            missing.discard(owners.get(node))
            waiting.extend(following for following, _ in node.next_functions)
    return [each for each in passes if each not in missing]
