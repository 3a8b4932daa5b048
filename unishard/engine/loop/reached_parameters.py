"""Compare which parameters the ranks' losses reach: gradients of different parameters would be added up, or their sizes
would not fit.

Before a backward that reduces, in the first updates, where the graph of the loss tells; after the last backward of
every window, where the gradients tell, together with the calls that `CallOrder` compares.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import EngineAdapter
from unishard.distributed import agreement
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.model.empty_parameters import is_empty
from unishard.engine.optim.stepping import is_marked, same_model
from unishard.errors import ContractError, ModelError

_logger = logging.getLogger("unishard")

_NAMED = 8
_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")


_open: WeakSet[EngineAdapter] = WeakSet()
"""Of all engines that are not closed: a loss may reach the parameters of several."""


class ReachedParameters:
    """The parameters that this rank's losses reach in an accumulation window."""

    def __init__(self, adapter: EngineAdapter, order: CallOrder, classes: Mapping[str, str]) -> None:
        """Before the first window.

        Args:
            adapter: The sharded model.
            order: The engine's position in the loop.
            classes: Class of each module by name, before the model was sharded.
        """
        self._adapter = adapter
        self._order = order
        self._classes = classes
        self._reached: set[str] = set()
        _open.add(adapter)
        self._looks_for_others = dist.get_rank() == 0 and dist.get_world_size() > 1
        self._described: tuple[tuple[str, ...], str] = ((), "")
        """The last names that were described, mostly those of every update."""

    def before_backward(self, loss: Tensor) -> str:
        """What will have no gradient after a backward that reduces; empty in updates and micro-batches that are not
        compared.

        Raises:
            ModelError: The loss reaches a parameter that the engine has replaced.
        """
        if not self._order.looks_at_update:
            return ""
        leaves = [*_leaves_of(loss)]
        names = {id(self._adapter.leaf(name)): name for name in self._adapter.shared_parameters()}
        own = {id(leaf) for leaf in (*self._adapter.module.parameters(), *self._adapter.leaves())}
        others = [leaf for leaf in leaves if id(leaf) not in own and id(leaf) not in names]
        self._refuse_replaced(others)
        self._warn_of_others(others)
        if not self._order.compares_ranks:
            return ""
        if self._adapter.reduces_each_backward:
            self._reached.clear()
        self._reached |= {names[id(leaf)] for leaf in leaves if id(leaf) in names}
        if not (self._order.last or self._adapter.reduces_each_backward):
            return ""
        reached, self._reached = self._reached, set()
        return self._describe([name for name in names.values() if name not in reached])

    def after_backward(self) -> str:
        """What has no gradient at the end of a window."""
        return self._describe(self._adapter.without_gradient()) if self._order.compares_ranks else ""

    def forget(self) -> None:
        """Forget the window, which is discarded."""
        self._reached.clear()

    def close(self) -> None:
        """The engine is closed."""
        _open.discard(self._adapter)

    def _refuse_replaced(self, others: Collection[Tensor]) -> None:
        """Refuse parameters of the model before it was sharded: the loss would see weights that no update changes."""
        prepared = next(iter(self._adapter.shared_parameters().values()), None)
        if prepared is None:
            return
        for leaf in others:
            if same_model(leaf, prepared):
                raise ModelError(
                    f"the loss uses a parameter of shape {tuple(leaf.shape)} that was taken from the model before "
                    "unishard.prepare, which has replaced it, so it would not train; register it in each module that "
                    "uses it, other.weight = layer.weight, or read it from its module in each forward, not from a "
                    "list, a closure or a variable"
                )

    def _warn_of_others(self, others: Collection[Tensor]) -> None:
        """Warn once of parameters in no prepared model, such as those of a loss with class centers."""
        if not self._looks_for_others:
            return
        prepared = {id(leaf) for adapter in _open for leaf in (*adapter.module.parameters(), *adapter.leaves())}
        other = next((each for each in others if isinstance(each, nn.Parameter) and id(each) not in prepared), None)
        if other is not None and not is_marked(other):
            self._looks_for_others = False
            _logger.warning(
                "the loss reaches a parameter of shape %s that is in no prepared model, such as one of a loss with "
                "weights of its own: its gradient is not averaged over the ranks, whose copies would become different; "
                "register it in the model before unishard.prepare, and compute the loss in the model's forward (ignore "
                "this if each rank has its own)",
                tuple(other.shape),
            )

    def _describe(self, names: Collection[str]) -> str:
        given = tuple(names)
        if given != self._described[0]:
            self._described = given, self._in_words(given)
        return self._described[1]

    def _in_words(self, names: Collection[str]) -> str:
        """The outermost modules of which no parameter has a gradient, by name and class, and other parameters."""
        missing = set(names)
        others = [name for name in self._adapter.shared_parameters() if name not in missing]
        parts = dict.fromkeys(self._part(name, others) for name in names)
        shown = ", ".join([*parts][:_NAMED])
        rest = len(parts) - _NAMED
        return f"{shown} and {rest} more ({zlib.crc32(repr(tuple(parts)).encode()):08x})" if rest > 0 else shown

    def _part(self, name: str, others: Collection[str]) -> str:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            module = ".".join(path[:depth])
            if self._classes.get(module, "") not in _CONTAINERS and not any(
                other.startswith(f"{module}.") for other in others
            ):
                return f"{module} ({self._classes.get(module, 'Module')})"
        return f"{name} ({self._classes.get('.'.join(path), 'Module')})" if path else name  # the root cannot be skipped


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves to which a loss has a path in autograd's graph."""
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # of a node that accumulates the gradient of a leaf
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


# -- Which parameters can train: those that were trainable in `prepare`; `set_trainable` freezes and unfreezes them --


class Trainable:
    """The parameters that can train: those that were trainable in `prepare` have a master weight on every engine."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.prepared = {name for name, parameter in self._named().items() if parameter.requires_grad}
        """Every name of the parameters that can train."""

    def choose(self, names: str | Iterable[str], trainable: bool) -> list[str]:
        """Resolve `names` to all names of the matching parameters. Collective.

        Args:
            names: As in `Weights.set_trainable`.
            trainable: Whether they are to be trainable.

        Raises:
            ContractError: A name matches nothing, a parameter was frozen in `prepare`, or no trainable one would be
                left.
            RankMismatchError: The ranks pass different names.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        agreement.agree({"names": wanted, "trainable": trainable}, "calls of set_trainable")
        named = self._named()
        meant = {named[found] for name in wanted for found in self._matches(name, named)}
        chosen = [name for name, parameter in named.items() if parameter in meant and not is_empty(parameter)]
        frozen = [name for name in chosen if name not in self.prepared]
        if trainable and frozen:
            raise _never_trained(frozen[0])
        if not trainable and not any(parameter.requires_grad for parameter in named.values() if parameter not in meant):
            raise ContractError(
                f"set_trainable({names!r}, False) would leave no trainable parameter; keep at least one trainable"
            )
        return chosen

    def require_frozen(self) -> None:
        """Raise ContractError if a parameter that was frozen in `prepare` now requires a gradient: no engine would
        train it.
        """
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self.prepared:
                raise _never_trained(name)

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def _matches(self, name: str, named: dict[str, nn.Parameter]) -> list[str]:
        matches = [each for each in named if each == name or each.startswith(f"{name}.") or fnmatchcase(each, name)]
        if not matches:
            near = get_close_matches(name, [*named, *(each for each, _ in self._module.named_modules() if each)], 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "engine.module.named_parameters() lists the names"
            raise ContractError(f"set_trainable: no parameter or module is called {name!r}; {hint}")
        return matches


def _never_trained(name: str) -> ContractError:
    return ContractError(
        f"{name} was frozen when the model was prepared, so it has no fp32 master weight and is not in the optimizer; "
        "leave it trainable in prepare, and call engine.weights.set_trainable(..., False) until you want to train it"
    )


def reaches(loss: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether the backward of a loss would accumulate a gradient on one of these leaves. Walks its graph."""
    wanted: set[Any] = {torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad}
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and wanted:
        node = waiting.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False
