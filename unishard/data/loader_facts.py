"""What a loader that people bring says about itself: its batch size, the share of the data it reads, and the order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from unishard.data.digest import of_dataset, of_value
from unishard.data.loader import ShareLoader
from unishard.data.sampler import ShareSampler


class Share(NamedTuple):
    """One of equal shares of a dataset."""

    source: str
    """What takes it."""
    number: int
    """Which one it is, from 0."""
    of: int
    """How many there are."""


class LoaderFacts(NamedTuple):
    """What is known of a loader without reading from it."""

    name: str
    """Its class."""
    ours: bool = False
    """Whether it is a `unishard.dataloader`, which shards the dataset itself."""
    batch_size: int | None = None
    """Samples in its batches; None if it may vary or is unknown."""
    hides_batches: bool = False
    """Whether the size is unknown and nothing of the user's own decides it, such as a batch sampler."""
    shares: tuple[Share, ...] = ()
    """Nested: each takes its share of what the next one yields."""
    whole: str | None = None
    """What reads the entire dataset, if nothing takes a share."""
    order: Hashable | None = None
    """What determines the order of the next pass of a loader that shuffles; None if it draws another one, or that is
    unknown."""
    reorder: str = ""
    """What to do for another order."""
    dataset: str | None = None
    """A digest of the dataset's samples; None if it is unknown, or not yet made."""


def facts_of(loader: Iterable[Any]) -> LoaderFacts:
    """What a loader's attributes say."""
    if isinstance(loader, ShareLoader):
        return LoaderFacts("unishard.dataloader", ours=True, batch_size=loader.micro_batch_size)
    name, by_accelerate = type(loader).__name__, _is_of_accelerate(loader)
    if not isinstance(loader, DataLoader) or (
        by_accelerate and name == "DataLoaderDispatcher"
    ):  # whose rank 0 reads for all
        return LoaderFacts(name, hides_batches=True)
    batch_sampler, divisor, shares = loader.batch_sampler, 1, _shares_of_accelerate(loader.dataset)
    if outer := _shares_of_accelerate(batch_sampler):
        shares += outer
        divisor = outer[0].of if getattr(batch_sampler, "split_batches", False) else 1
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    if isinstance(batch_sampler, ShareSampler):
        shares.append(
            Share("unishard.dataloader", batch_sampler.rank, batch_sampler.round // batch_sampler.micro_batch_size)
        )
    plain: Any = batch_sampler if _is_torchs(batch_sampler, BatchSampler) else None
    sampler: Any = loader.sampler if plain is None else plain.sampler
    if isinstance(sampler, DistributedSampler):
        shares.append(Share(type(sampler).__name__, sampler.rank, sampler.num_replicas))
    shares = [share for share in shares if share.of > 1]
    order, reorder = (None, "") if by_accelerate else _order(sampler)
    return LoaderFacts(
        name,
        batch_size=None if plain is None else plain.batch_size // divisor,
        hides_batches=batch_sampler is None,
        shares=tuple(shares),
        whole=_whole(sampler) if not shares and batch_sampler is plain else None,
        order=order,
        reorder=reorder,
    )


def _is_of_accelerate(part: Any) -> bool:
    return type(part).__module__.startswith("accelerate.")


def _shares_of_accelerate(part: Any) -> list[Share]:
    """The share that `BatchSamplerShard` or `IterableDatasetShard` takes (Accelerate 1.15, data_loader.py)."""
    count, index = getattr(part, "num_processes", None), getattr(part, "process_index", None)
    return (
        [Share("Accelerate", index, count)]
        if _is_of_accelerate(part) and isinstance(count, int) and isinstance(index, int)
        else []
    )


def _whole(sampler: Any) -> str | None:
    if isinstance(sampler, DistributedSampler):
        return f"{type(sampler).__name__}(num_replicas=1)"
    return type(sampler).__name__ if _is_torchs(sampler, SequentialSampler, RandomSampler) else None


def _is_torchs(part: Any, *kinds: type) -> bool:
    """Whether a sampler is of one of torch's classes, not of a subclass; torchdata's stateful ones have the same names
    (0.11).
    """
    kind = type(part)
    return kind in kinds or (
        kind.__module__.startswith("torchdata.") and kind.__name__ in {torch_kind.__name__ for torch_kind in kinds}
    )


def _order(sampler: Any) -> tuple[Hashable | None, str]:
    """What determines a sampler's next order, and what to do for another one."""
    if isinstance(sampler, DistributedSampler):
        by_epoch = type(sampler).__iter__ is DistributedSampler.__iter__ or type(sampler).__module__.startswith(
            "torchdata."
        )
        again = (
            f"its {type(sampler).__name__} is still at epoch {sampler.epoch}: call set_epoch(epoch) on it before "
            "each epoch"
        )
        return ((sampler.seed, sampler.epoch), again) if sampler.shuffle and by_epoch else (None, "")
    if type(sampler) is RandomSampler and sampler.generator is not None:
        again = "its generator has the same seed again: make it once, before the loop over epochs"
        return of_value(sampler.generator.get_state()), again
    return None, ""


def digest_of(dataset: Any) -> str | None:
    """A digest that differs between ranks with different data; for a `Subset` at least a digest of its indices."""
    indices: Any = dataset.indices if type(dataset) is Subset else None
    digest = of_dataset(dataset)
    if digest is not None or not (
        isinstance(indices, list | tuple | range | Tensor) or type(indices).__module__ == "numpy"
    ):
        return digest
    return of_value([len(indices), *indices[:1000], *indices[-1:]])
