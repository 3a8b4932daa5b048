"""A model that runs for a proof, and is afterwards as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.kit.forwards import is_compiled
from unishard.logits.forward import whole_logits

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A block of forwards without a graph, dropout modules, compilation, losses in chunks and warnings.

    Random states, buffers, and the numbers and lists of tensors that modules count and collect in are those of before.
    """
    restore = [*map(_state_of, model.modules()), *_random_states()]
    compiled = any(map(is_compiled, model.modules()))
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    dropouts = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    try:
        with whole_logits(), torch.no_grad(), eager, torch.random.fork_rng(cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _in_evaluation(dropouts):
                yield
    finally:
        for each in restore:
            each()


def evaluating(model: nn.Module) -> Any:
    """A block in which a model is in evaluation mode."""
    return _in_evaluation(model.modules())


def seed(number: int) -> None:
    """Begin the random numbers of a forward."""
    torch.manual_seed(number)
    random.seed(number)


@contextmanager
def _in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _state_of(module: nn.Module) -> Callable[[], None]:
    """What gives a module back its buffers, numbers and lists."""
    own, buffers = vars(module), dict(module.named_buffers(recurse=False, remove_duplicate=False))
    numbers = {name: value for name, value in own.items() if type(value) in (int, float)}
    lists = [(value, len(value)) for value in own.values() if type(value) is list]
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]

    def restore() -> None:
        own.update(numbers)
        for collected, length in lists:
            if any(isinstance(each, Tensor) for each in collected[length:]):
                del collected[length:]
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
        for buffer, value in values:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)

    return restore


def _random_states() -> Iterator[Callable[[], None]]:
    """What gives Python and numpy their random numbers back."""
    state = random.getstate()
    yield lambda: random.setstate(state)
    if (numpy := sys.modules.get("numpy")) is not None:
        drawn = numpy.random.get_state()
        yield lambda: numpy.random.set_state(drawn)
