"""Steps a user's optimizer on whole tensors, each on the rank that owns it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unishard.distributed.nested_optimizers import (
    HOOKS,
    attributes_of,
    completed,
    groups_in,
    holds_copies,
    optimizers_in,
    write_attribute,
)
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import ConfigError, Problem
from unishard.matrices.exchange import Exchange
from unishard.matrices.owners import Matrix

Make = Callable[[Sequence[nn.Parameter]], Optimizer]
"""An optimizer of these tensors, in the order of the model's parameters."""


class Needs(NamedTuple):
    """What an update of an optimizer needs."""

    element_wise: bool
    """Whether it may step any cut of the tensors, in any number of calls, and keeps nothing but state of their
    shapes."""
    by_tensor: bool = True
    """Whether the update of a tensor needs no other tensor."""
    only_owned: bool = False
    """Whether it steps no tensors that another rank owns, which have no elements and no gradient."""
    unknown: str = ""
    """Why it could not be asked."""
    unsaved: str = ""
    """Why its state cannot be saved."""


class WholeLayout(NamedTuple):
    """How the tensors of an optimizer are sharded."""

    layout: Mapping[int, Sequence[Matrix]]
    """Of each group, by the identity of its dict."""
    stepped: Callable[[], Mapping[str, SteppedShard]]
    """Called in a step: where the shards are that it changes, by name."""
    shards: Callable[[], Mapping[str, Shard]]
    """Called between steps: the weights of this rank, by name."""
    written: Callable[[], None]
    """Called after these are written. Collective."""
    device: torch.device
    """Where tensors are exchanged."""
    steps_on: torch.device
    """Where owners step them."""
    calls: int
    """Calls of `step` in one update."""


class _Received(NamedTuple):
    """Tensors that were received together."""

    exchange: Exchange | None
    matrices: Sequence[Matrix]
    weights: Sequence[Tensor]
    """This rank's interval of each, flat, in the memory that an engine steps."""


class WholeTensors(ShardOptimizer):
    """What an engine steps in place of an optimizer that is not element-wise, with the same groups.

    In an update each owner gets whole weights and gradients, the user's optimizer steps them in one call, and shards of
    the new weights are sent back. So state is whole, and lies with the owner.
    """

    steps_late = True

    given: Optimizer
    """The user's."""
    tensors: dict[str, nn.Parameter]
    """What it steps, by name; of what other ranks own, tensors without elements."""

    @staticmethod
    def of(given: Optimizer, names: Mapping[int, str], again: Make | None, needs: Needs) -> WholeTensors:
        """The same optimizer for an engine.

        Args:
            given: Has not stepped yet.
            names: Names of its parameters, by `id`, in the model's order.
            again: Makes the same optimizer on other tensors, if it can be made again.
            needs: What its update needs.
        """
        own: WholeTensors = object.__new__(type(type(given).__name__, (WholeTensors,), {}))
        base = {name: value for name, value in vars(given).items() if name.startswith("_")}
        own.__setstate__(
            base | {"defaults": given.defaults, "param_groups": given.param_groups, "state": defaultdict(dict)}
        )
        own.given, own.needs, own._is_whole = given, needs, False
        own._again, own._names, own._sharing = again, [*names.values()], None
        own._places = _places(given, names)
        own._parts, own._calls, own._changed, own._keeps_weights = [], 0, set(), False
        return own

    needs: Needs
    _is_whole: bool
    """Whether it steps the model's parameters themselves."""
    _keeps_weights: bool
    """Whether owners keep whole weights between updates, since copies of weights are compared with all of them."""
    _again: Make | None
    _names: list[str]
    _places: list[tuple[dict[str, Any], list[str]]]
    """The groups of the user's optimizer and of those that it holds, with the names of their parameters."""
    _sharing: WholeLayout | None
    _parts: list[_Received]
    """Received in this update."""
    _calls: int
    _changed: set[str]
    """The places of numbers that steps have changed: the others are options."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "given" not in vars(self):
            raise AttributeError(name)
        return getattr(self.given, name)

    @property
    def modes(self) -> bool:
        """Whether it has modes of training and evaluation, as schedule-free ones."""
        kind = type(self.given)
        return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))

    def matrices(self) -> Iterator[Matrix]:
        """All tensors, once an engine has said how they are sharded."""
        for members in self._sharing.layout.values() if self._sharing else ():
            yield from members

    def first_state(self, options: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
        """Nothing: state is no shard."""
        return {}

    def share(self, sharing: WholeLayout, parameters: Mapping[str, nn.Parameter] | None) -> None:
        """Step shards from now on. Collective.

        Args:
            sharing: How tensors are sharded.
            parameters: The parameters themselves by name, where these are what is stepped.

        Raises:
            ConfigError: Its update needs all tensors together, or it has copies of whole tensors.
        """
        self._sharing, self._is_whole = sharing, parameters is not None
        shards = sharing.shards()
        self.tensors = dict(parameters or {}) or {
            name: nn.Parameter(shard.values.new_empty([0] * max(1, len(shard.shape)), device=sharing.steps_on))
            for name, shard in shards.items()
        }
        has_state = any(each.state for each in optimizers_in(self.given))
        if not self._is_whole and (has_state or holds_copies(self.given, {each.shape for each in shards.values()})):
            self._make_again()
        self.train_mode(True)

    def _make_again(self) -> None:
        kind = type(self.given).__name__
        if self._again is None:
            _refuse(
                f"{kind} has copies of the whole parameters from when it was constructed, which cannot be sharded; "
                f"pass a function that builds it, such as lambda params: {kind}(...)"
            )
        with torch.no_grad():
            self._receive_weights()
        self._parts.clear()
        self._made_again(completed(self._again([self.tensors[name] for name in self._names])))

    def _made_again(self, made: Optimizer) -> None:
        """Let an optimizer of whole tensors be the user's: with the group dicts that the engine steps."""
        places = _places(made, {id(tensor): name for name, tensor in self.tensors.items()})
        live, found = _by_names(self._places, self.given), _by_names(places, made)
        if found.keys() - live.keys():
            _refuse(
                f"precision.keep_fp32 divides groups of {type(made).__name__}, which has state from when it was "
                "constructed; give the parameters that it keeps groups of their own"
            )
        same = {id(group): live[names] for names, group in found.items()}
        self._places = [(same.get(id(group), group), names) for group, names in places]
        for each in optimizers_in(made):
            each.param_groups[:] = [same.get(id(group), group) for group in each.param_groups]
        self.given, self._keeps_weights = made, True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take part in an update. Collective if tensors are sharded; the last call of an update makes it."""
        sharing = self._sharing
        if sharing is None:  # an engine that lets it make its state before it trains
            return None
        stepped = sharing.stepped()
        for group in self.param_groups:
            matrices = [each for each in sharing.layout[id(group)] if each.name in stepped]
            for _, members in groupby(matrices, key=lambda each: each.bucket):
                self._receive([*members], stepped, sharing)
        self._calls += 1
        if self._calls == sharing.calls:
            self._calls = 0
            if self._parts:  # else the update is skipped
                if self._keeps_weights:  # it may write those without a gradient, too
                    self._receive_weights(but={each.name for part in self._parts for each in part.matrices})
                self._call(lambda: self.given.step())
                self._send_back()
        return None

    @torch.no_grad()
    def train_mode(self, training: bool) -> bool:
        """Call its `train` or `eval`, if it has them, which may write weights. Collective."""
        if self._sharing is None or not self.modes:
            return False
        self._receive_weights()
        self._call(partial(getattr(type(self.given), "train" if training else "eval"), self.given))
        self._send_back()
        self._sharing.written()
        return True

    def _receive_weights(self, but: Collection[str] = ()) -> None:
        """Get whole weights of all owned tensors but those of some names, without gradients. Collective."""
        if self._sharing is None:
            return
        places = {name: SteppedShard(shard.values) for name, shard in self._sharing.shards().items() if name not in but}
        for members in self._sharing.layout.values():
            for _, each in groupby((each for each in members if each.name in places), key=lambda each: each.bucket):
                self._receive([*each], places, self._sharing, gradients=False)

    def _receive(
        self,
        matrices: Sequence[Matrix],
        stepped: Mapping[str, SteppedShard],
        sharing: WholeLayout,
        *,
        gradients: bool = True,
    ) -> None:
        found = [stepped[each.name] for each in matrices]
        parts = list(zip(matrices, found, strict=True))
        weights = [_interval(matrix, each.tensor.detach(), each.start) for matrix, each in parts]
        slopes = [_interval(matrix, each.tensor.grad, each.start) for matrix, each in parts] if gradients else []
        if matrices[0].bucket < 0:
            self._parts.append(_Received(None, matrices, weights))
            self._give(matrices, weights, slopes, sharing)
            return
        exchange = Exchange(matrices)
        self._parts.append(_Received(exchange, matrices, weights))

        def wholes(intervals: Sequence[Tensor]) -> list[Tensor]:
            sent = [each.to(sharing.device, matrices[0].dtype) for each in intervals]
            return exchange.to_owners(sent, matrices) if sent else []

        self._give(exchange.owned, wholes(weights), wholes(slopes), sharing)

    def _give(
        self, matrices: Sequence[Matrix], weights: Sequence[Tensor], slopes: Sequence[Tensor], sharing: WholeLayout
    ) -> None:
        for number, matrix in enumerate(matrices):
            tensor = self.tensors[matrix.name]
            if not self._is_whole:
                tensor.data = weights[number].view(matrix.shape).to(sharing.steps_on)
                tensor.grad = slopes[number].view(matrix.shape).to(tensor) if slopes else None

    def _call(self, call: Callable[[], Any]) -> None:
        """Call the user's optimizer, once in all calls of an update, while its groups have the tensors."""
        before = dict(_numbers(self.given))
        with self._holding_tensors():
            call()
        self._changed.update(place for place, value in _numbers(self.given) if before.get(place) != value)

    @contextmanager
    def _holding_tensors(self) -> Iterator[None]:
        before = [group["params"] for group, _ in self._places]
        hooks = {name: vars(self.given)[name] for name in HOOKS}
        vars(self.given).update({name: OrderedDict() for name in HOOKS})  # they were called on what the engine steps
        for group, names in self._places:
            every = [self.tensors[name] for name in names]
            group["params"] = [each for each in every if each.numel()] if self.needs.only_owned else every
        try:
            yield
        finally:
            vars(self.given).update(hooks)
            for (group, _), params in zip(self._places, before, strict=True):
                group["params"] = params

    def _send_back(self) -> None:
        """Write the new weights into the memory that the engine steps. Collective."""
        for exchange, matrices, weights in self._parts:
            members = matrices if exchange is None else exchange.owned
            wholes = [self.tensors[each.name].detach() for each in members]
            if exchange is not None:
                device = self._sharing.device if self._sharing else weights[0].device
                sent = [each.to(device, matrices[0].dtype) for each in wholes]
                like = torch.empty(0, dtype=matrices[0].dtype, device=device)
                wholes = exchange.from_owners(sent, like, matrices)
            for whole, into in zip(wholes, weights, strict=True):
                if whole.data_ptr() != into.data_ptr():
                    into.copy_(whole.reshape(into.shape))
            for tensor in (self.tensors[each.name] for each in members if not self._is_whole):
                tensor.grad = None
                if not self._keeps_weights:
                    tensor.data = tensor.new_empty(0)
        self._parts.clear()

    # -- in checkpoints ----------------------------------------------------------------------------

    def state_of(self, name: str) -> dict[int, dict[str, Any]]:
        """What it and those that it holds, by their number, keep of a tensor that this rank owns."""
        tensor: Any = self.tensors[name]
        every = enumerate(optimizers_in(self.given))
        return {number: each.state[tensor] for number, each in every if each.state.get(tensor)}

    def write_state(self, name: str, state: Mapping[int, dict[str, Any]]) -> None:
        """Write what `state_of` returned."""
        tensor: Any = self.tensors[name]
        for number, each in enumerate(optimizers_in(self.given)):
            each.state.pop(tensor, None)
            if number in state:
                each.state[tensor] = _on(tensor.device, state[number])

    def numbers(self) -> dict[str, Any]:
        """The numbers that steps have changed, such as a count of them, by their place."""
        return {place: value for place, value in _numbers(self.given) if place in self._changed}

    def write_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Write what `numbers` returned."""
        for place, value in numbers.items():
            write_attribute(self.given, place, value)
        self._changed.update(numbers)

    def copies(self) -> dict[str, Tensor]:
        """Tensors that it keeps in attributes, by their place, as far as this rank owns them."""
        found = {place: value for place, value in attributes_of(self.given) if isinstance(value, Tensor)}
        return {place: value for place, value in found.items() if value.numel()}


def _on(device: torch.device, value: Any) -> Any:
    """A value with its tensors on a device, but for numbers, which many optimizers keep on the host."""
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(device, item) for item in value)
    return value.to(device) if isinstance(value, Tensor) and value.dim() else value


def _places(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[dict[str, Any], list[str]]]:
    return [(group, [names[id(parameter)] for parameter in group["params"]]) for group in groups_in(optimizer)]


def _by_names(
    places: Sequence[tuple[dict[str, Any], list[str]]], optimizer: Optimizer
) -> dict[tuple[str, ...], dict[str, Any]]:
    """The optimizer's own groups that have parameters, by the names of these."""
    own = {*map(id, optimizer.param_groups)}
    return {tuple(names): group for group, names in places if names and id(group) in own}


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("optimizer", what)])


def _numbers(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    return ((place, value) for place, value in attributes_of(optimizer) if isinstance(value, int | float))


def _interval(matrix: Matrix, tensor: Tensor | None, start: int) -> Tensor:
    """This rank's elements, flat or all of them; an empty tensor where it has none."""
    if tensor is None or not matrix.held:
        return torch.empty(0, dtype=matrix.dtype)
    if matrix.group is None and tensor.shape == matrix.shape:
        return tensor
    return tensor.view(-1)[start : start + matrix.held]
