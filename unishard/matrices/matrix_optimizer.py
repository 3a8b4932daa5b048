"""The base class of optimizers whose update needs whole matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import SteppedShard
from unishard.matrices.adamw import ADAMW, first_state, step_adamw
from unishard.matrices.exchange import Exchange
from unishard.matrices.owners import Matrix


class _Sharing(NamedTuple):
    """How an optimizer's matrices are sharded."""

    matrices: Mapping[int, Sequence[Matrix]]
    """Of each group, by the identity of its dict: engines step some groups at a time."""
    stepped: Callable[[], Mapping[str, SteppedShard]]
    device: torch.device


class MatrixOptimizer(ShardOptimizer):
    """An optimizer whose update needs whole matrices; a subclass is what it does with one: `update`.

    It steps shards as it steps full parameters. Each matrix has an owner among the ranks that share it, which gets the
    gradient, calls `update`, and sends the result back. Groups with `matrices=False` are stepped by AdamW, element by
    element, with options `lr`, `betas`, `eps` and `weight_decay`.

    Without an engine it is an ordinary torch optimizer.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Hold parameters.

        Args:
            params: As in any torch optimizer. In groups with `matrices=True`, which is the default, parameters have two
                dimensions, or three: a matrix for each index of the first, as in fused experts.
            options: Defaults of the groups of matrices; `lr` and `weight_decay` at least.

        Raises:
            ValueError: A parameter in such a group has other dimensions.
        """
        self._options = options
        self._sharing: _Sharing | None = None
        self.owned: dict[str, dict[str, Any]] = {}
        """What `update` keeps of the matrices that this rank owns, by name; without an engine it is in `state`."""
        super().__init__(params, {"lr": options["lr"], "matrices": True})

    @abstractmethod
    def update(self, matrix: Matrix, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        """The update of a matrix, which is subtracted from it times `rate`. Only its owner calls this.

        Args:
            matrix: Its name and its shape (m, n), or (k, m, n) for k matrices of one parameter.
            gradient: Of that shape: what `accumulate` made of the gradient, in `sent_as`.
            state: Kept between updates, and saved: tensors of any shape, and numbers. Empty at first.
            options: Of its group.

        Returns:
            A tensor of that shape.
        """

    def accumulate(self, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        """What is sent to the owner in place of a gradient, such as a momentum: element-wise, on shards of any shape.

        Args:
            gradient: A shard, of many matrices together in some engines. Not to be changed.
            state: Kept between updates, sharded like the gradient: tensors of its shape.
            options: Of its group.
        """
        return gradient

    def rate(self, shape: Sequence[int], options: Mapping[str, Any]) -> float:
        """The factor of the update of a matrix of this shape; by default the learning rate."""
        return float(options["lr"])

    def sent_as(self, options: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype in which gradients and updates are sent; None for that of the gradients."""
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with defaults of its kind."""
        is_matrices = param_group.get("matrices", True)
        super().add_param_group({**(self._options if is_matrices else ADAMW), **param_group})
        for parameter in self.param_groups[-1]["params"] if is_matrices else ():
            if parameter.dim() not in (2, 3):
                raise ValueError(
                    f"{type(self).__name__} needs matrices, and a parameter has the shape {tuple(parameter.shape)}; "
                    "put it into a group with matrices=False, which AdamW steps"
                )

    def share(
        self,
        matrices: Sequence[Sequence[Matrix]],
        stepped: Callable[[], Mapping[str, SteppedShard]],
        device: torch.device,
    ) -> None:
        """Step shards from now on.

        Args:
            matrices: Of each group, all that are stepped as matrices; see `owners.owned`.
            stepped: Called in a step: where it finds the shards of the parameters that it changes, by name; the same
                names on all ranks that share them.
            device: Where matrices are exchanged and updated.
        """
        groups = zip(self.param_groups, matrices, strict=True)
        self._sharing = _Sharing({id(group): members for group, members in groups}, stepped, device)

    def matrices(self) -> Iterator[Matrix]:
        """All that are stepped as matrices, once an engine has said how they are sharded."""
        for members in self._sharing.matrices.values() if self._sharing else ():
            yield from members

    @property
    def device(self) -> torch.device | None:
        """Where matrices are updated; None without an engine: where they are."""
        return self._sharing.device if self._sharing else None

    def first_state(self, options: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
        """The state that the first step creates for a tensor; no step is made."""
        if not options["matrices"]:
            return first_state(tensor)
        state: dict[str, Any] = {}
        self.accumulate(torch.zeros_like(tensor), state, options)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Collective if they are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["matrices"]:
                step_adamw(group, self.state)
        groups = [group for group in self.param_groups if group["matrices"]]
        if groups and self._sharing is not None:
            self._step_shards(groups, self._sharing)
        else:
            self._step_parameters(groups)
        return loss

    def _step_parameters(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    direction = self.accumulate(parameter.grad, state, group)
                    sent = direction.to(self.sent_as(group) or direction.dtype)
                    update = self.update(Matrix("", parameter.shape, parameter.dtype), sent, state, group)
                    self._subtract(parameter, update.to(sent.dtype), parameter.shape, group)

    def _step_shards(self, groups: Sequence[dict[str, Any]], sharing: _Sharing) -> None:
        stepped = sharing.stepped()
        for group in groups:
            directions = {
                tensor: self.accumulate(tensor.grad, self.state[tensor], group)
                for tensor in group["params"]
                if tensor.grad is not None
            }
            matrices = [each for each in sharing.matrices[id(group)] if each.name in stepped]
            shards = [_Shard(each, stepped[each.name], directions) for each in matrices]
            for bucket, members in groupby(shards, key=lambda shard: shard.matrix.bucket):
                self._update_bucket([*members], group, sharing.device, shared=bucket >= 0)

    def _update_bucket(
        self, shards: Sequence[_Shard], group: Mapping[str, Any], device: torch.device, *, shared: bool
    ) -> None:
        """Update matrices, each by its owner, which is this rank if they are not shared."""
        matrices = [each.matrix for each in shards]
        dtype = self.sent_as(group) or matrices[0].dtype
        sent = [each.direction.to(device, dtype) for each in shards]
        exchange = Exchange(matrices) if shared else None
        wholes = sent if exchange is None else exchange.to_owners(sent, matrices)
        updates = [
            self.update(matrix, whole, self.owned.setdefault(matrix.name, {}), group).to(dtype)
            for matrix, whole in zip(matrices if exchange is None else exchange.owned, wholes, strict=True)
        ]
        parts = updates if exchange is None else exchange.from_owners(updates, sent[0], matrices)
        for each, part in zip(shards, parts, strict=True):
            self._subtract(each.weights, part.to(each.weights.device), each.matrix.shape, group)

    def _subtract(self, weights: Tensor, update: Tensor, shape: torch.Size, group: Mapping[str, Any]) -> None:
        if weights.numel():
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(update.view(weights.shape), alpha=-self.rate(shape, group))


class _Shard:
    """This rank's part of a matrix in one step: its weights, and what is sent of its gradient."""

    def __init__(self, matrix: Matrix, stepped: SteppedShard, directions: Mapping[Tensor, Tensor]) -> None:
        self.matrix = matrix
        self._start = stepped.start
        if not matrix.held:  # all of it belongs to other ranks
            self.weights = self.direction = stepped.tensor.new_empty(0, dtype=matrix.dtype)
        else:
            self.weights, self.direction = self._part(stepped.tensor.detach()), self._part(directions[stepped.tensor])

    def _part(self, tensor: Tensor) -> Tensor:
        """The matrix if all of it is here, else this rank's interval, flat."""
        if self.matrix.group is None and tensor.shape == self.matrix.shape:
            return tensor
        part = tensor.view(-1)[self._start : self._start + self.matrix.held]
        return part.view(self.matrix.shape) if self.matrix.group is None else part
