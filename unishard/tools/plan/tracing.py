"""Run one micro-batch of a model without data or memory, and record which activations are alive when. Imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unishard.config import Config
from unishard.contract.kit import kept_fp32
from unishard.contract.kit.dtypes import cast_to_compute
from unishard.contract.kit.input_casts import cast_inputs
from unishard.engine.model import activation_checkpointing
from unishard.engine.model.shape import shape_of
from unishard.logits.forward import ChunkedForward
from unishard.tools.plan.activations import Activations, Exchanged, Kind, Phase, Segment
from unishard.tools.plan.causal_masks import of_single_documents
from unishard.tools.plan.counting import Noted
from unishard.tools.plan.shared_samples import sharing_samples

Place = tuple[str, str, int]


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Records when the memory of each tensor that an operation creates appears and is freed."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int, int]] = []
        """Of each storage: its number, its bytes or minus those, and the index of the place."""
        self.places: list[Place] = [("forward", "", -1)]
        self.excluded: set[int] = set()
        """Numbers of the storages that hold gradients of parameters."""
        self._known = known
        self._numbers: dict[int, int] = {}
        self._count = 0

    def enter(self, place: Place) -> None:
        """What is created from now on belongs here."""
        if place != self.places[-1]:
            self.places.append(place)

    def exclude(self, tensor: Tensor) -> None:
        """Do not count a tensor."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self.excluded.add(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = _grouped_products if func.name() == "aten::_grouped_mm" else func
        out = computed(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._numbers:
            return
        number, size = self._count, storage.nbytes()
        self._count += 1
        self._numbers[key] = number
        self.events.append((number, size, len(self.places) - 1))
        weakref.finalize(storage, self._freed, key, number, size)

    def _freed(self, key: int, number: int, size: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self.events.append((number, -size, len(self.places) - 1))

    def segments(self) -> Iterator[Segment]:
        """The peaks of each place; a place that is entered again is another segment."""
        peaks, ends = [0] * len(self.places), [0] * len(self.places)
        live = at = 0
        for number, size, place in self.events:
            while at < place:
                at += 1
                peaks[at] = ends[at] = live
            live += size if number not in self.excluded else 0
            peaks[at], ends[at] = max(peaks[at], live), live
        for (phase, module, unit), peak, end in zip(self.places, peaks, ends, strict=True):
            yield Segment("forward" if phase == "forward" else "backward", module, unit, peak, end)


def _grouped_products(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Those of experts, for any dtype: without data torch 2.13 multiplies groups in bf16 only
    (_meta_registrations.py, _meta_grouped_mm_common).
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():  # a product for each group, not one of all
        shape.insert(0, left.shape[0] if offs is None else offs.numel())
    return left.new_empty(shape)


def trace(
    model: nn.Module,
    cfg: Config,
    batch: Callable[[int, int], Mapping[str, Any]],
    loss: Callable[[Any], Tensor],
    *,
    micro_batch_size: int,
    seq_len: int,
    fake: Any,
    noted: list[Noted],
) -> Activations:
    """Run a forward and a backward in `precision.compute` with the recomputation of a config. Changes the model.

    Args:
        model: Built under `fake`.
        cfg: The config.
        batch: Makes the arguments of the model's forward from the micro-batch size and the sequence length.
        loss: Computes the loss from what forward returns.
        micro_batch_size: Samples.
        seq_len: Tokens of each; of a rank's part of it, where `parallel.sequence` is on.
        fake: The `FakeTensorMode`.
        noted: Gets what the model exchanges with ranks that have layers or experts together.

    Raises:
        ModelError: As `prepare` does for `activation_checkpointing`, `training.loss_chunk_tokens` and
            `parallel.sequence`.
    """
    shape = shape_of(model, cfg.sharding)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recomputed = activation_checkpointing.find(model, cfg.activation_checkpointing, cfg.sharding)
    activation_checkpointing.apply(recomputed, selective=cfg.activation_checkpointing == "selective")
    if cfg.training.loss_chunk_tokens is not None:
        ChunkedForward(model, cfg.training.loss_chunk_tokens)
    kept_fp32.mark_kept(model, kept_fp32.find_kept(model, cfg.precision, train=False).names)
    sharing = sharing_samples(model, cfg.parallel, micro_batch_size, seq_len, noted)
    with fake, of_single_documents(), sharing as part:
        cast_to_compute(model.parameters(), cfg.precision)
        for parameter in trainable:
            parameter.requires_grad_(True)
        units = {name: model.get_submodule(name) for name in shape.units}
        cast_inputs([model, *units.values()], cfg.precision)
        model.train()
        inputs = dict(batch(micro_batch_size, part))
        held = (*model.parameters(), *model.buffers(), *tree_leaves(inputs))
        live = _Live({tensor.untyped_storage()._cdata for tensor in held if isinstance(tensor, Tensor)})
        with _watched(model, units, trainable, live), live:
            out = model(**inputs)
            mean = loss(out)
            del out  # as in `loss = engine(**batch).loss`
            live.enter(("backward", "", -1))
            in_forward = len(noted)
            mean.backward()  # type: ignore[no-untyped-call]
    word = cfg.activation_checkpointing
    segments = _joined(list(live.segments()))
    recomputation = word if isinstance(word, str) else ", ".join(word)
    sent = (*_added_up(noted[:in_forward], "forward"), *_added_up(noted[in_forward:], "backward"))
    return Activations(micro_batch_size, seq_len, recomputation, segments, exchanged=sent)


def _added_up(noted: Sequence[Noted], phase: Phase) -> Iterator[Exchanged]:
    """Those of a phase by kind and group."""
    alike: dict[tuple[Kind, int, int], list[int]] = {}
    for kind, ranks, stride, nbytes in noted:
        alike.setdefault((kind, ranks, stride), []).append(nbytes)
    for (kind, ranks, stride), sizes in alike.items():
        yield Exchanged(kind, phase, ranks, stride, sum(sizes), len(sizes))


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    """Without the short segments between modules, which the next one covers, unless they are the largest of their
    phase.
    """
    largest = {
        phase: max((each.nbytes for each in segments if each.phase == phase), default=0)
        for phase in ("forward", "backward")
    }
    return tuple(each for each in segments if each.module or each.nbytes == largest[each.phase])


@contextmanager
def _watched(
    model: nn.Module, units: Mapping[str, nn.Module], trainable: list[nn.Parameter], live: _Live
) -> Iterator[None]:
    """A block in which modules say when they compute, and gradients of parameters are dropped."""
    handles: list[Any] = []

    def drop(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.exclude(parameter.grad)
            parameter.grad = None

    def watch(name: str, module: nn.Module, unit: int) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            live.enter(("forward", name, unit))

        def after(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            live.enter(("forward", "", -1))
            for tensor in tree_leaves(list(out.values()) if isinstance(out, Mapping) else out):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: live.enter(("backward", name, unit)))  # type: ignore[no-untyped-call]

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    for index, (name, module) in enumerate(units.items()):
        watch(name, module, index)
    for name, module in _outside(model, set(map(id, units.values()))):
        watch(name, module, -1)
    handles += [parameter.register_post_accumulate_grad_hook(drop) for parameter in trainable]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _outside(module: nn.Module, units: set[int], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are no units, lie in none and contain none."""
    for name, child in module.named_children():
        if id(child) in units:
            continue
        if any(id(part) in units for part in child.modules()):
            yield from _outside(child, units, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name, child
