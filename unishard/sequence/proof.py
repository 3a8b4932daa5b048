"""Proves that attention is all in a model that mixes positions, by four small forwards.

Attention is replaced by something that leaves each position by itself. Then positions of every rank's part run all
together, once more with other tokens in the parts of the other ranks, once more each a part further along, and each
rank's own by themselves. Where all give the same for its own, nothing else in the model looks at another position: no
convolution, recurrence, state space, pooling, attention by own code, position counted in the forward, or loss over the
whole sequence. Where they do not, `unishard.sequence.followed` finds the module, or that numbers were only rounded.

A model that trains runs in training mode. What differs only there counts unless the model draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import ModelError
from unishard.sequence.exchange import gather_plain
from unishard.sequence.followed import Mixing, first_mixing
from unishard.sequence.forward import SplitForward
from unishard.sequence.kept_losses import KeptLoss, changed_by_parts, kept_losses
from unishard.sequence.padding import IGNORED
from unishard.sequence.same_positions import OF_ROWS, OTHER_SHAPES, PartOfAll, dimension, own, same
from unishard.sequence.unchanged import evaluating, seed, unchanged

_TOKENS, _LEAST = 1024, 32
"""Of all ranks' parts together, and positions of a part, if it has so many."""
_KEPT = ("position_ids", "labels", "shift_labels", "attention_mask")
"""What is not tokens."""

Run = Callable[..., Any]


class _Probe(NamedTuple):
    """The arguments of a forward."""

    args: Any
    kwargs: dict[str, Any]

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> _Probe:
        """With other tensors, made of those here, and of their names."""

        def of(name: str, value: Any) -> Any:
            return replace_tensors(value, lambda tensor: change(name, tensor))

        return _Probe(of("", self.args), {name: of(name, value) for name, value in self.kwargs.items()})


def prove(
    model: nn.Module, run: Run, forward: SplitForward, args: Any, kwargs: dict[str, Any], *, again: bool
) -> tuple[KeptLoss, ...]:
    """Check that a model can be split, with positions of a micro-batch. Collective.

    Args:
        model: The model.
        run: Its forward, through the engine.
        forward: What splits it.
        args: Of the forward of this rank's part.
        kwargs: Likewise.
        again: Whether it was checked before: then only whether tokens in other parts change anything.

    Returns:
        Losses that modules keep as attributes, and of which parts make another one; none where it was checked before.

    Raises:
        ContractError: The samples were not split.
        ModelError: On every rank: the model mixes positions elsewhere; names the module.
    """
    split, group = forward.check(args, kwargs), forward.group
    count = min(split.part, max(_LEAST, _TOKENS // (len(split.documents) * group.size)))
    share = PartOfAll(group.rank, group.size, count)
    part = _part(forward, _Probe(args, kwargs), split.part, share)
    runs = _Runs(run, (part, *_of_all(forward, part, share)), share, again=again)
    with unchanged(model), forward.proof():
        before = kept_losses(model)
        mixing = runs.mixing(model)
        _require_own_heads(forward)
        if mixing is not None:
            raise _refusal(model, forward, kwargs, mixing)
        part_only, every = (partial(runs.made, probe) for probe in _sorted(part, runs.whole, share))
        return () if again else changed_by_parts(model, before, part_only, every, group)


class _Runs:
    """The forwards that are compared."""

    def __init__(self, run: Run, probes: tuple[_Probe, ...], share: PartOfAll, *, again: bool) -> None:
        self._run, self._probes, self._share, self._again = run, probes, share, again
        self.whole = probes[1]

    def made(self, probe: _Probe, number: int = 0) -> Any:
        """What the model makes of a probe, with random numbers that begin like this."""
        seed(number)
        return self._run(*probe.args, **probe.kwargs)

    def mixing(self, model: nn.Module) -> Mixing | None:
        """The module that mixes positions; None if none does. Collective.

        In a usual model nothing differs. What does may be rounded in another way, or random.
        """
        if self._independent():
            return None
        found = None
        if model.training and not self._draws():
            found = self._first_mixing(model, only_other=True)
        if found is None:
            with evaluating(model):
                found = self._first_mixing(model, only_other=self._again)
        return found

    def _independent(self) -> bool:
        """Whether no position depends on another, wherever it is: the output says it. Collective."""
        part_only, *among = (list(tensors_in(self.made(probe))) for probe in self._probes[: 3 if self._again else 4])
        places = (self._share.rank, self._share.rank, self._share.next_rank)
        whole, *others = (
            [own(*pair, self._share, place) for pair in zip(made, part_only, strict=False)]
            for made, place in zip(among, places, strict=False)
        )
        equal = (self._again or all(same(here, there, OTHER_SHAPES) for here, there in whole)) and all(
            torch.equal(first, second)
            for other in others
            for (first, _), (second, _) in zip(whole, other, strict=False)
            if first.dim() >= OF_ROWS
        )
        return _on_all(equal and len({len(part_only), *map(len, among)}) == 1)

    def _first_mixing(self, model: nn.Module, *, only_other: bool) -> Mixing | None:
        """As the first rank with one finds it. Collective."""
        runs = [partial(self.made, probe) for probe in self._probes]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, first_mixing(model, runs, self._share, only_other=only_other))
        found = [each for each in everyones if each is not None]
        return Mixing(found[0].name, all(each.counts for each in found)) if found else None

    def _draws(self) -> bool:
        """Whether the model draws random numbers. Collective."""
        first, second = (list(tensors_in(self.made(self.whole, number))) for number in range(2))
        return not _on_all(all(map(torch.equal, first, second)))


def _part(forward: SplitForward, call: _Probe, length: int, share: PartOfAll) -> _Probe:
    """Positions of this rank's part, from its first to its last."""
    places = torch.linspace(0, length - 1, share.length).round().long()

    def chosen(name: str, tensor: Tensor) -> Tensor:
        dim = _dim(name, tensor)
        if forward.parts.is_whole(tensor) or tensor.dim() < OF_ROWS or tensor.shape[dim] != length:
            return tensor
        return tensor.index_select(dim, places.to(tensor.device))

    part = call.changed(chosen)
    own = {name: _labelled(name, value, share) for name, value in part.kwargs.items()}
    positions = own.get("position_ids")
    if isinstance(positions, Tensor):  # a document begins in the middle of each part
        later = torch.arange(share.length, device=positions.device) >= share.length // 2
        own["position_ids"] = (positions - later.to(positions.dtype)).clamp(min=0)
        own.pop("attention_mask", None)  # under which transformers does not keep documents apart
    return _Probe(part.args, own)


def _labelled(key: str, value: Any, share: PartOfAll) -> Any:
    """Labels of which the first rank has none: a mean over a part, or a shift inside of one, makes another loss."""
    if key not in ("labels", "shift_labels") or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    if value.dim() < 2:  # of whole samples
        return value
    return value.clamp(min=0) if share.rank else torch.full_like(value, IGNORED)


def _of_all(forward: SplitForward, part: _Probe, share: PartOfAll) -> tuple[_Probe, _Probe, _Probe]:
    """The positions of all ranks' parts; with other tokens in those of the others; and each where the next one was.

    The other tokens are one that this rank has, of which there are then so many that none is left for another of its
    kind where modules take only some. Collective in the group.
    """

    def everyones(name: str, tensor: Tensor) -> Tensor:
        dim = _dim(name, tensor)
        if forward.parts.is_whole(tensor) or tensor.dim() < OF_ROWS or tensor.shape[dim] != share.length:
            return tensor
        return torch.cat(gather_plain(tensor, forward.group), dim)

    def other(name: str, tensor: Tensor, dim: int) -> Tensor:
        if name in _KEPT:
            return tensor
        mine = torch.arange(share.length, device=tensor.device) + share.rank * share.length
        own = tensor.index_select(dim, mine)
        one = own[:1].narrow(dim, 0, 1)
        return one.expand_as(tensor).index_copy(dim, mine, own)

    whole = part.changed(everyones)
    return (
        whole,
        _positions_changed(part, whole, share, other),
        _positions_changed(part, whole, share, lambda name, tensor, dim: tensor.roll(share.length, dim)),
    )


def _positions_changed(
    part: _Probe, whole: _Probe, share: PartOfAll, change: Callable[[str, Tensor, int], Tensor]
) -> _Probe:
    """The arguments over all positions, where those that have positions are changed along them."""
    parts = iter([*tensors_in(part.args), *(each for value in part.kwargs.values() for each in tensors_in(value))])

    def changed(name: str, tensor: Tensor) -> Tensor:
        dim = dimension(tensor, next(parts), share)
        return tensor if dim is None else change(name, tensor, dim)

    return whole.changed(changed)


def _sorted(part: _Probe, whole: _Probe, share: PartOfAll) -> tuple[_Probe, _Probe]:
    """This rank's and all positions, with tokens that differ from part to part."""

    def ordered(name: str, tensor: Tensor, dim: int) -> Tensor:
        return tensor if name in _KEPT else tensor.sort(dim).values

    def own(name: str, tensor: Tensor, dim: int) -> Tensor:
        return ordered(name, tensor, dim).chunk(share.size, dim)[share.rank]

    return _positions_changed(part, whole, share, own), _positions_changed(part, whole, share, ordered)


def _dim(name: str, tensor: Tensor) -> int:
    return tensor.dim() - 1 if name == "position_ids" else 1


def _on_all(same: bool) -> bool:
    equal = torch.tensor([same], dtype=torch.int32, device=_device())
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal.item())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _require_own_heads(forward: SplitForward) -> None:
    """Refuse functions that are declared by heads, and mix them on any rank. Collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, forward.mixed_heads)
    if mixed := sorted(set().union(*everyones)):
        raise ModelError(
            f"{mixed[0]} is declared by unishard.by_heads, but what it computes for a head depends on other heads, so "
            "it would train wrongly in silence under parallel.sequence; take the declaration away, or remove "
            "parallel.sequence"
        )


def _refusal(model: nn.Module, forward: SplitForward, kwargs: dict[str, Any], mixing: Mixing) -> ModelError:
    if forward.shifts_labels and "labels" in kwargs and "shift_labels" not in kwargs and not mixing.name:
        return ModelError(
            f"{type(model).__name__} was called with labels and without shift_labels, so that a label at the border of "
            "each part would be lost; pass all that engine.batches yields: engine(**batch)"
        )
    module = model.get_submodule(mixing.name)
    where = f"{mixing.name} ({type(module).__name__})" if mixing.name else type(module).__name__
    if mixing.counts:
        return ModelError(
            f"{where} counts positions, or what came before, from the beginning of each part, as torch.arange(length) "
            "of rotary embeddings or of a table of positions does, so it would train wrongly in silence under "
            "parallel.sequence; let it take position_ids, which engine.batches adds to a batch with input_ids, or "
            "remove parallel.sequence"
        )
    return ModelError(
        f"{where} mixes positions of a sequence outside of attention, or computes a loss that is no mean over tokens, "
        "so it would train wrongly in silence under parallel.sequence; call unishard.attention where it is attention, "
        "compute the loss of its logits in the script, or remove parallel.sequence"
    )
