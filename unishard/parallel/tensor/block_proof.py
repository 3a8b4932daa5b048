"""Proves once, before the first update, that each kind of block computes the same whole and cut, forward and backward.

A block may do what its cut parts do not allow, such as to read the number of heads from a config, or to take a mean
over features of which each rank has a part: shapes may fit all the same, and training would be wrong in silence. The
block is run with what the model called it with, on random weights that differ more than those a training begins with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.nested_tensors import tensors_in
from unishard.distributed.slices import own_part, slice_of
from unishard.errors import ModelError
from unishard.parallel.groups import Groups
from unishard.parallel.tensor.applied import apply_styles
from unishard.parallel.tensor.blocks import CutBlock
from unishard.parallel.tensor.cutter import Cutter

_OTHER = 0.1
"""Of a norm: far above what rounding does, and far below what other heads or features do."""
_SMALL = 20
"""How much smaller than the largest gradient one may be, so that rounding does not make most of it."""
_ADVICE = (
    "; take the number of heads from an attribute such as num_heads of its own, not from a config, and leave what "
    "computes with all features at once out of parallel.tensor.plan"
)
_COPIES = 8
"""Of a block's weights in fp32, which there must be room for."""
_DTYPES = (torch.float32, torch.bfloat16)
"""The second for what does not run in the first."""


class BlockProof:
    """Of the blocks of a model, until each was proved."""

    def __init__(self, model: nn.Module, blocks: Sequence[CutBlock], groups: Groups) -> None:
        """Watch the blocks, before they are cut."""
        self._blocks, self._groups, self._eager = [*blocks], groups, ExitStack()
        self._before = model.register_forward_pre_hook(self._before_first)
        self._after = model.register_forward_hook(self._after_forward)
        self._ended = model.register_forward_hook(self._after_first, always_call=True)

    def close(self) -> None:
        """Watch no more."""
        for hook in (self._before, self._ended, self._after):
            hook.remove()
        while self._blocks:
            self._blocks.pop().close()

    def _before_first(self, module: nn.Module, args: object) -> None:
        """In the first forward compiled blocks run as they are written, so that their calls are seen."""
        self._before.remove()
        if not torch.compiler.is_compiling():
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def _after_first(self, module: nn.Module, args: object, output: object) -> None:
        self._eager.close()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._ended.remove()  # not in itself: torch goes over such hooks where a forward failed
        if not torch.is_grad_enabled():  # no update will come
            self._prove([block for block in self._blocks if not block.proved], gradients=False)

    def prove(self) -> None:
        """Compare the blocks that were called. Collective in the group.

        Raises:
            ModelError: One computes something else; names it.
        """
        self._prove(self._blocks, gradients=True)
        self._blocks = [block for block in self._blocks if not block.was_called]
        if not self._blocks:
            self._after.remove()

    def _prove(self, blocks: Sequence[CutBlock], *, gradients: bool) -> None:
        for block in blocks:
            if not block.was_called:
                continue
            with _undisturbed(block.device):
                wrong = _Comparison(block, self._groups).difference(gradients=gradients)
            if wrong is not None:
                raise ModelError(
                    f"parallel.tensor: {block.name or 'the model'} ({type(block.module).__name__}) is not the same "
                    f"when it is cut: {wrong}"
                )
            block.proved = True


class _Comparison(NamedTuple):
    """Of a block with itself, whole and cut."""

    block: CutBlock
    groups: Groups

    def difference(self, *, gradients: bool) -> str | None:
        """What is another one than that of the whole block; None also where nothing is proved."""
        if self._any(not _has_room(self.block)):
            return None
        for dtype in _DTYPES:
            whole = _tried(self.block, self.block.made(dtype), dtype)
            if not self._any(not whole.ran):
                break
        else:
            return None
        with self._cut(dtype) as module:
            cut = _tried(self.block, module, dtype)
            return None if self._any(not cut.ran) else self._compared(module, whole, cut, gradients=gradients)

    @contextmanager
    def _cut(self, dtype: torch.dtype) -> Iterator[nn.Module]:
        module = self.block.made(dtype)
        modules = {f"{self.block.name}.{name}".strip("."): each for name, each in module.named_modules()}
        cutter = Cutter(modules, self.groups)
        try:
            apply_styles(cutter, modules, self.block.styles)
            yield module
        finally:
            cutter.close()

    def _compared(self, module: nn.Module, whole: _Run, cut: _Run, *, gradients: bool) -> str | None:
        pairs = [each for each in zip(whole.outputs, cut.outputs, strict=False) if each[0].shape == each[1].shape]
        if self._any(any(_differ(found, expected, 0.0) for expected, found in pairs)):
            return f"its output is another one{_ADVICE}"
        return self._other_gradient(module, whole, cut, pairs) if gradients else None

    def _other_gradient(
        self, module: nn.Module, whole: _Run, cut: _Run, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> str | None:
        parameters = dict(module.named_parameters())
        expected = _gradients(whole, [each for each, _ in pairs])
        found = _gradients(cut, [each for _, each in pairs])
        least = max((_rms(each) for each in expected.values()), default=0.0) / _SMALL
        for name, full in expected.items():
            own, parameter = found[name], parameters.get(name)
            is_whole = parameter is not None and slice_of(parameter) is None
            if is_whole:
                dist.all_reduce(own, group=self.groups.peers)
            elif parameter is not None:
                full = own_part(parameter, full)
            if self._any(_differ(own / self.groups.size if is_whole else own, full, least)):
                in_parts = is_whole and not self._any(_differ(own, full, least))
                return self._in_parts(name) if in_parts else f"the gradient of {name} is another one{_ADVICE}"
        return None

    def _in_parts(self, name: str) -> str:
        owner = f"{self.block.name}.{name}".strip(".").rpartition(".")[0]
        return (
            f"{owner} has whole weights, and each rank has a part of their gradients; add {owner}: "
            "replicated_with_grad_allreduce to parallel.tensor.plan"
        )

    def _any(self, held: bool) -> bool:
        """Whether it holds on a rank of the group. Collective in it."""
        flag = torch.tensor(float(held), device=self.block.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.groups.peers)
        return bool(flag)


class _Run(NamedTuple):
    """What a block made of its arguments."""

    ran: bool
    """By itself, and without random numbers."""
    outputs: list[Tensor]
    sources: dict[str, Tensor]
    """Of gradients: parameters and inputs."""


def _tried(block: CutBlock, module: nn.Module, dtype: torch.dtype) -> _Run:
    """What a block makes of the kept call."""
    before = _random_state(block.device)
    try:
        inputs, (args, kwargs) = block.call(dtype)
        outputs = [each for each in tensors_in(module(*args, **kwargs)) if each.is_floating_point()]
    except Exception:  # of a foreign forward, which needs what is around it, or another dtype
        return _Run(False, [], {})
    sources: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if each.requires_grad}
    sources |= {f"input {number}": each for number, each in enumerate(inputs)}
    return _Run(torch.equal(before, _random_state(block.device)), outputs, sources)


def _gradients(run: _Run, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of a sum with other weights for each element of the outputs."""
    total = torch.zeros((), device=outputs[0].device) if outputs else torch.zeros(())
    for each in outputs:
        if each.requires_grad:
            weights = torch.arange(each.numel(), device=each.device).add(1.7).mul(12.9898).sin()
            total = total + (each.float() * weights.view(each.shape)).sum()
    if not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, [*run.sources.values()], allow_unused=True, materialize_grads=True)
    return {name: each.float().contiguous() for name, each in zip(run.sources, found, strict=True)}


def _differ(found: Tensor, expected: Tensor, least: float) -> bool:
    """Whether it is further away than rounding brings it; False of what is not finite."""
    norm = max(float(expected.norm()), least * math.sqrt(expected.numel()), 1e-6 * math.sqrt(expected.numel()))
    return float((found - expected).norm()) > _OTHER * norm


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A block of forwards with gradients, after which random numbers are as before."""
    with torch.inference_mode(mode=False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield


def _has_room(block: CutBlock) -> bool:
    device = block.device
    if device.type != "cuda":
        return True
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return block.elements * 4 * _COPIES <= free
