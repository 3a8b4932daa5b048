"""Find parameters that a loss reaches and that the engine does not train: of the model before it was sharded, and in no
model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import Updates
from unishard.engine.guards.graph import leaves_of
from unishard.engine.guards.guard import Guard, Looks
from unishard.engine.optim.stepping import is_marked, same_model
from unishard.errors import ModelError
from unishard.failures.compared_call import ComparedCall

_logger = logging.getLogger("unishard")

_open: WeakSet[Updates] = WeakSet()
"""Of all engines that are not closed: a loss may reach the parameters of several."""


class OtherParameters(Guard):
    """Refuses parameters that `prepare` has replaced, and warns once of those that are in no prepared model.

    Without it: the loss sees weights that no update changes; and of a parameter in no model, each rank's copy trains on
    its own samples, so that the copies become different.
    """

    looks = Looks.AT_UPDATES

    def __init__(self, updates: Updates) -> None:
        """Look at the losses of this engine.

        Args:
            updates: Of the sharded model.
        """
        self._updates = updates
        _open.add(updates)
        self._warns = dist.get_rank() == 0 and dist.get_world_size() > 1

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Look at what the loss reaches.

        Raises:
            ModelError: A parameter that the engine has replaced.
        """
        leaves = self._updates.leaves()
        own = {id(leaf) for leaf in (*self._updates.model.module.parameters(), *leaves.values())}
        shared = {id(leaves.get(name, each)) for name, each in self._updates.shared_parameters.items()}
        others = [leaf for leaf in leaves_of(loss) if id(leaf) not in own and id(leaf) not in shared]
        self._refuse_replaced(others)
        self._warn_of_unknown(others)

    def close(self) -> None:
        """Count this engine no longer."""
        _open.discard(self._updates)

    def _refuse_replaced(self, others: Collection[Tensor]) -> None:
        prepared = next(iter(self._updates.shared_parameters.values()), None)
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

    def _warn_of_unknown(self, others: Collection[Tensor]) -> None:
        """Such as those of a loss with class centers."""
        if not self._warns:
            return
        prepared = {id(leaf) for each in _open for leaf in (*each.model.module.parameters(), *each.leaves().values())}
        unprepared = next(
            (each for each in others if isinstance(each, nn.Parameter) and id(each) not in prepared), None
        )
        if unprepared is not None and not is_marked(unprepared):
            self._warns = False
            _logger.warning(
                "the loss reaches a parameter of shape %s that is in no prepared model, such as one of a loss with "
                "weights of its own: its gradient is not averaged over the ranks, whose copies would become different; "
                "register it in the model before unishard.prepare, and compute the loss in the model's forward (ignore "
                "this if each rank has its own)",
                tuple(unprepared.shape),
            )
