"""Ask an optimizer what it looks at in an update: step a copy of it on small tensors, whole and cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unishard.checkpoint.user_state import pack
from unishard.distributed.nested_optimizers import attributes_of, copied, discard, groups_in, optimizers_in
from unishard.errors import CheckpointError
from unishard.matrices.whole_tensors import Make, Needs

_ELEMENT_WISE = {
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "DeepSpeedCPUAdam",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}
_PACKAGES = ("torch", "lion_pytorch", "deepspeed")
"""Their classes of these names need no trial."""

_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((), ()),
    ((7,), (5000,)),
    ((6, 5), (80, 64)),
    ((3, 4, 5), (4, 40, 32)),
    ((4, 3, 2, 2), (24, 16, 4, 4)),
)
"""By dimensions, a small shape, and one of more than the 4096 elements from which some optimizers step in blocks."""
_SCALES = (1.0, 0.01, 100.0, 1.0, 3.0, 0.3, 1.0)
"""Of the gradients in each step: a spike shows what clips; and in seven steps what is done in each fifth or sixth."""
_LEAST_RATE = 0.01
_FEW = 4
_ROUNDING = 1e-3
"""The largest difference between two updates that are the same but for rounding, by the size of the update."""


def is_known(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to be element-wise by its class: what a subclass does differently is not."""
    kind = type(optimizer)
    return kind.__name__ in _ELEMENT_WISE and kind.__module__.partition(".")[0] in _PACKAGES


def ask(optimizer: Optimizer, parameters: Sequence[Tensor], again: Make | None) -> Needs:
    """Step copies of an optimizer on small tensors. Changes neither it nor random states.

    Args:
        optimizer: Has not stepped yet.
        parameters: What its groups hold, in the model's order.
        again: Makes the same optimizer on other tensors, if it can be made again.
    """
    makes = [_copies(optimizer, parameters), *([] if again is None else [again])]
    failed = ""
    with _random_states():
        for make in makes:
            try:
                return _Trial(make, parameters).needs()
            except Exception as error:
                failed = failed or f"{type(error).__name__}: {error}"
    return Needs(element_wise=False, unknown=failed)


def _copies(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Make:
    """Copies whose groups have a few tensors of each number of dimensions."""
    few: set[int] = set()
    for group in groups_in(optimizer):
        by_dim: dict[int, list[int]] = {}
        for each in group["params"]:
            by_dim.setdefault(each.dim(), []).append(id(each))
        few.update(number for numbers in by_dim.values() for number in numbers[:_FEW])

    def make(tensors: Sequence[nn.Parameter]) -> Optimizer:
        moved = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
        stepped = {id(moved[number]) for number in few if number in moved}
        copy_of = copied(optimizer, moved)
        for group in groups_in(copy_of):
            group["params"] = [each for each in group["params"] if id(each) in stepped]
        return copy_of

    return make


class _Trial:
    """Tensors, gradients, and what an optimizer makes of them."""

    def __init__(self, make: Make, parameters: Sequence[Tensor]) -> None:
        self._make, self._unsaved = make, ""
        device = next((each.device for each in parameters if each.device.type != "meta"), torch.device("cpu"))
        numbers, seen = torch.Generator().manual_seed(0), [0] * len(_SHAPES)
        self._start: list[Tensor] = []
        for number, parameter in enumerate(parameters):
            dim = min(parameter.dim(), len(_SHAPES) - 1)
            large, seen[dim] = seen[dim] in (1, 2), seen[dim] + 1
            scale = (1.0, 0.03, 0.3)[number % 3]
            self._start.append((scale * torch.randn(_SHAPES[dim][large], generator=numbers)).to(device))
        self._gradients = [
            [(scale * (0.5 + torch.randn(each.shape, generator=numbers))).to(device) for each in self._start]
            for scale in _SCALES
        ]

    def needs(self) -> Needs:
        """Compare updates of whole tensors with those of cut ones, and with those of some tensors at a time."""
        whole, counts = self._whole(seed=0)
        if not all(isfinite(float(each.sum())) for each in whole):
            return Needs(element_wise=False, unknown="its steps on small tensors are not finite")
        noise = self._difference(self._whole(seed=1)[0], whole)
        bound = _ROUNDING + 3 * noise

        def alike(update: Callable[[], list[Tensor]]) -> bool:
            torch.manual_seed(0)
            return self._difference(update(), whole) <= bound

        if not counts and _succeeds(lambda: alike(self._in_rows)) and _succeeds(lambda: alike(self._in_flat_parts)):
            return Needs(element_wise=True)
        if _succeeds(lambda: alike(self._by_owners)):
            return Needs(element_wise=False, unsaved=self._unsaved)
        by_tensor = alike(lambda: self._by_owners(only_owned=True))
        return Needs(element_wise=False, by_tensor=by_tensor, only_owned=True, unsaved=self._unsaved)

    def _difference(self, some: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
        """The largest one of a tensor, by the size of its update."""
        every = zip(some, whole, self._start, strict=True)
        return float(torch.stack([(a - b).norm() / (b - c).norm().clamp(min=1e-30) for a, b, c in every]).max())

    def _new(self, tensors: Sequence[nn.Parameter]) -> Optimizer:
        optimizer = self._make(tensors)
        held = {id(each) for group in groups_in(optimizer) for each in group["params"]}
        if held - {id(each) for each in tensors}:
            raise ValueError("it has other parameters than those that it is given")
        for group in groups_in(optimizer):
            if isinstance(group.get("lr"), int | float):  # a schedule may begin at 0, with which nothing shows
                group["lr"] = max(group["lr"], _LEAST_RATE)
        for each in optimizers_in(optimizer):
            if callable(train := getattr(each, "train", None)):
                train()
        return optimizer

    def _tensors(self) -> list[nn.Parameter]:
        return [nn.Parameter(each.clone()) for each in self._start]

    def _whole(self, seed: int) -> tuple[list[Tensor], bool]:
        """What whole tensors become, and whether the optimizer keeps more than state of their shapes."""
        torch.manual_seed(seed)
        tensors = self._tensors()
        optimizer = self._new(tensors)
        before = _numbers(optimizer)
        for gradients in self._gradients:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient.clone()
            optimizer.step()
        keeps = (
            len(optimizers_in(optimizer)) > 1
            or callable(getattr(optimizer, "train", None))
            or _numbers(optimizer) != before
            or not all(_fits(value, tensor) for tensor in tensors for value in optimizer.state[tensor].values())
        )
        try:
            pack([[*state.values()] for each in optimizers_in(optimizer) for state in each.state.values()])
        except CheckpointError as error:
            self._unsaved = str(error)
        discard(optimizer)
        return [each.detach() for each in tensors], keeps

    def _in_rows(self) -> list[Tensor]:
        """As FSDP2 cuts: each tensor in two, which keep its dimensions."""
        return self._cut(lambda wholes: [[*each.chunk(2)] if each.dim() else [each] for each in wholes], at_once=True)

    def _in_flat_parts(self) -> list[Tensor]:
        """As ZeRO cuts: flat intervals, each stepped on its own."""
        return self._cut(lambda wholes: [[*each.view(-1).tensor_split(3)] for each in wholes], at_once=False)

    def _cut(self, cut: Callable[[Sequence[Tensor]], list[list[Tensor]]], *, at_once: bool) -> list[Tensor]:
        tensors = self._tensors()
        optimizer = self._new(tensors)
        parts = {
            id(tensor): [nn.Parameter(part) for part in each if part.numel()]
            for tensor, each in zip(tensors, cut([each.detach() for each in tensors]), strict=True)
        }
        groups: list[dict[str, Any]] = optimizer.param_groups
        for group in groups:
            group["params"] = [part for tensor in group["params"] for part in parts[id(tensor)]]
            group.pop("param_names", None)
        for gradients in self._gradients:
            for tensor, each in zip(tensors, cut(gradients), strict=True):
                for part, gradient in zip(parts[id(tensor)], (each for each in each if each.numel()), strict=True):
                    part.grad = gradient.clone()
            if at_once:
                optimizer.step()
                continue
            for group in groups:
                optimizer.param_groups = [group]
                own = group["params"]
                for part in own:
                    group["params"] = [part]
                    optimizer.step()
                group["params"] = own
        discard(optimizer)
        return [each.detach() for each in tensors]

    def _by_owners(self, *, only_owned: bool = False) -> list[Tensor]:
        """As owners step: some tensors on each, of the others nothing, or tensors without elements."""
        result = [each.clone() for each in self._start]
        for owner in (0, 1):
            tensors = [
                nn.Parameter(each.clone() if number % 2 == owner else each.new_empty([0] * max(1, each.dim())))
                for number, each in enumerate(self._start)
            ]
            optimizer = self._new(tensors)
            for group in groups_in(optimizer) if only_owned else ():
                group["params"] = [each for each in group["params"] if each.numel()]
            for gradients in self._gradients:
                for tensor, gradient in list(zip(tensors, gradients, strict=True))[owner::2]:
                    tensor.grad = gradient.clone()
                optimizer.step()
            result[owner::2] = [each.detach() for each in tensors[owner::2]]
            discard(optimizer)
        return result


def _numbers(optimizer: Optimizer) -> list[Any]:
    """The numbers that it keeps besides its state, such as a count of steps."""
    return [
        value.tolist() if isinstance(value, Tensor) else value
        for _, value in attributes_of(optimizer)
        if not isinstance(value, bool)
    ]


def _fits(value: Any, tensor: Tensor) -> bool:
    """Whether a value of the state of a tensor has its shape, or is a number."""
    if isinstance(value, Tensor):
        return value.shape == tensor.shape or value.numel() == 1
    return isinstance(value, int | float | None)


def _succeeds(alike: Callable[[], bool]) -> bool:
    """Whether cut tensors are updated as whole ones; not if the optimizer refuses them."""
    try:
        return alike()
    except Exception:
        return False


@contextmanager
def _random_states() -> Iterator[None]:
    state = random.getstate()
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        random.setstate(state)
