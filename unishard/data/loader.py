"""A data loader that gives each rank its share of the data: the same global batches for any number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any, ClassVar, Never

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unishard.config import Config, expect_config
from unishard.config.data_share import data_share_of
from unishard.config.describe import count_of
from unishard.config.topology import Topology
from unishard.data.sampler import ShareSampler
from unishard.data.seeds import seed_of
from unishard.errors import DataError
from unishard.failures import prelaunch_errors

_DECIDED = {
    "batch_size": "is set by training.micro_batch_size in the config",
    "sampler": "is set by unishard, so that every rank gets its share",
    "batch_sampler": "is set by unishard, so that every rank gets its share",
    "in_order": "is always true, so that the position tells which samples were read",
    "pin_memory_device": "is that of the current accelerator; torch has deprecated the option",
}


class Cursor:
    """Where a loader is: the epoch, and the number of its samples that all ranks have read in total."""

    def __init__(self, epoch: int = 0, samples: int = 0) -> None:
        self.now = self.next = (epoch, samples)
        """Where the loader is, and where its next iteration begins."""


class ShareLoader(DataLoader[Any]):
    """A torch `DataLoader` with a resumable position; returned by `dataloader`.

    The position counts batches that were yielded, not those that workers have prefetched. It is the same on all ranks:
    the epoch, and the number of its samples that all ranks have read in total.
    """

    unfollowed: ClassVar[int] = 0
    """Batches of all loaders that were read without the knowledge of an engine."""
    last_unfollowed: ClassVar[weakref.ref[ShareLoader] | None] = None
    """The loader of the last one."""

    def __init__(self, dataset: Dataset[Any], sampler: ShareSampler, **options: Any) -> None:
        # A separate generator: drawing the workers' seeds from torch's global one would change the model's random
        # numbers.
        self._own_generator = None if options.get("generator") is not None else torch.Generator()
        super().__init__(
            dataset, batch_sampler=sampler, **{**options, "generator": options.get("generator") or self._own_generator}
        )
        self._shares = sampler
        self.cursor = Cursor()
        self.untouched = True
        """Whether it was neither iterated nor given a position."""
        self.yielded = 0
        """Batches of all iterations."""
        self.followed = 0
        """How many loops of engines know that they read it."""
        self.at_repeated = False
        """Whether a loop without an engine has its last batch, which has repeated samples."""

    @property
    def epoch(self) -> int:
        """The epoch being read; after its last batch, the next one."""
        return self.cursor.now[0]

    @property
    def order(self) -> dict[str, Any]:
        """What determines the order of the samples, besides the epoch."""
        return self._shares.identity

    def continue_after(self, cursor: Cursor) -> None:
        """Begin where another loader's next iteration would."""
        self.cursor = Cursor(*cursor.next)

    def require_enough_samples(self) -> None:
        """Raise DataError if the dataset does not fill one micro-batch on each rank: each round would repeat
        samples.
        """
        shares = self._shares
        if shares.dataset_length >= shares.round:
            return
        ranks = shares.round // shares.micro_batch_size
        most = shares.dataset_length // ranks
        instead = (
            f"set training.micro_batch_size to at most {most}, or use more data"
            if most
            else "use more data, or fewer ranks"
        )
        raise DataError(
            f"the dataset has {count_of(shares.dataset_length, 'sample')}, but a micro-batch on each rank takes "
            f"{shares.round} (training.micro_batch_size {shares.micro_batch_size} x {count_of(ranks, 'rank')}), so "
            f"every update would repeat samples; {instead}"
        )

    @property
    def repeated(self) -> int:
        """Samples that fill up the last batches of an epoch."""
        return self._shares.repeated

    @property
    def round(self) -> int:
        """Samples in one batch of each rank."""
        return self._shares.round

    @property
    def micro_batch_size(self) -> int:
        """Samples in one batch."""
        return self._shares.micro_batch_size

    @property
    def batches_left(self) -> int:
        """Batches that the next iteration yields on each rank; `len` is that of a full epoch."""
        return self.batches_after(self.cursor.next[1])

    def batches_after(self, samples: int) -> int:
        """Batches of each rank in the rest of an epoch, after all ranks have read this many samples in total."""
        return self._shares.rounds_after(samples)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterator type is private
        """The rest of the epoch after `load_state_dict` (possibly empty with more ranks and `drop_last`), else the next
        epoch.
        """
        shares, cursor = self._shares, self.cursor
        shares.epoch, shares.samples = epoch, samples = cursor.now = cursor.next
        cursor.next = (epoch + 1, 0)
        self.untouched = False
        if self._own_generator is not None:
            self._own_generator.manual_seed(seed_of(shares.seed, epoch, samples, shares.rank))
        return self._counted(super().__iter__(), epoch, samples)

    def _counted(self, batches: Iterator[Any], epoch: int, samples: int) -> Iterator[Any]:
        for batch in batches:
            samples += self._shares.round
            self.cursor.now = (epoch, samples) if self._shares.rounds_after(samples) else (epoch + 1, 0)
            self.yielded += 1
            if not self.followed:
                ShareLoader.unfollowed += 1
                ShareLoader.last_unfollowed = weakref.ref(self)
                self.at_repeated = bool(self.repeated) and not self._shares.rounds_after(samples)
            try:
                yield batch
            finally:
                self.at_repeated = False
        self.cursor.now = (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its samples all ranks have read in total, and what determines the order. JSON."""
        epoch, samples = self.cursor.now
        return {"epoch": epoch, "samples": samples, **self._shares.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at the saved position, on any number of ranks.

        Args:
            state: From `state_dict` of any rank.

        Raises:
            DataError: It is not such a state, or belongs to another order of samples.
        """
        identity = self._shares.identity
        if not {"epoch", "samples", *identity} <= state.keys() or not (
            is_count(state["epoch"]) and is_count(state["samples"])
        ):
            raise DataError(
                f"the state ({', '.join(map(str, state))}) is not from a unishard.dataloader; pass what its "
                "state_dict() returned"
            )
        changed = [f"{name} was {state[name]}, is {now}" for name, now in identity.items() if state[name] != now]
        if changed:
            raise DataError(
                f"the loader's state belongs to another order of samples ({'; '.join(changed)}); use the same dataset, "
                "seed and shuffle"
            )
        self.cursor.now = self.cursor.next = (state["epoch"], state["samples"])
        self.untouched = False


def is_count(value: object) -> bool:
    """Whether a number in a saved position can be one of epochs, samples or batches."""
    return type(value) is int and 0 <= value < 2**62


def dataloader(
    dataset: Dataset[Any],
    cfg: Config,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    generator: torch.Generator | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    **refused: Never,
) -> ShareLoader:
    """Create a torch `DataLoader` over this rank's share of a dataset, in micro-batches of the config's size.

    The order depends only on `training.seed` and the epoch. Micro-batch `i` of rank `r` of `W` is slice `i * W + r` of
    it, so the samples of an optimizer step are the same for any number of ranks with the same global batch size. Each
    iteration is a new epoch with a new order; so is one over a new loader of the same dataset in `engine.batches`. All
    ranks get the same number of micro-batches, all of them full.

    `state_dict()` and `load_state_dict()` resume in the middle of an epoch, on any number of ranks, with any
    `training.micro_batch_size` and any `num_workers`: the remaining samples follow in the same order.

    Ranks that share samples (`parallel.sequence`) count as one here, and read the same.

    Args:
        dataset: Map-style: it has `__len__` and `__getitem__`. The same on all ranks.
        cfg: Supplies `training.micro_batch_size` and `training.seed`.
        shuffle: Whether to reshuffle in each epoch; else the order is the dataset's.
        drop_last: Drop the samples at the end of an epoch that do not give each rank a full micro-batch. By default the
            ranks are filled up with samples from the beginning of the order, as torch's `DistributedSampler` does.
        collate_fn: Makes a batch of a list of samples; default: torch's.
        num_workers: Worker processes of each rank; 0 loads in this process.
        pin_memory: Whether batches are in pinned memory, which speeds up copies to a GPU; default: if CUDA is
            available.
        timeout: Seconds to wait for a batch of a worker before an error; 0 waits forever.
        worker_init_fn: Called in each worker with its number, after it is seeded.
        multiprocessing_context: How workers start: `fork`, `spawn`, `forkserver`, or a context; default: Python's.
        generator: Seeds the workers instead of `training.seed`, the epoch, the position and the rank. It does not
            affect the order.
        prefetch_factor: Batches that each worker loads in advance; default: torch's.
        persistent_workers: Keep the workers between epochs.
        refused: Nothing: torch's other options are set by the config or by unishard.

    Raises:
        ConfigError: `parallel.sequence.size` does not divide the ranks.
        DataError: The dataset is iterable-style, empty, or too small for `drop_last`; an option is set by the config;
            or a switch is neither True nor False.
        TypeError: There is no such option.
        ValueError: torch refuses the options, such as `prefetch_factor` without workers.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"dataloader needs a dataset of samples, got {type(dataset).__name__}; its keys are no samples: pass one "
            "of its splits, or torch.utils.data.TensorDataset(*tensors), datasets.Dataset.from_dict(data), or a list "
            "of samples"
        )
    expect_config(cfg)
    prelaunch_errors.install()
    switches = {"shuffle": shuffle, "drop_last": drop_last, "persistent_workers": persistent_workers}
    for name, value in (switches | ({} if pin_memory is None else {"pin_memory": pin_memory})).items():
        if value not in (True, False):
            raise DataError(f"dataloader: {name} must be True or False, got {value!r:.60}")
    for name in refused:
        if name not in _DECIDED:
            raise TypeError(f"dataloader() got an unexpected keyword argument {name!r}")
        raise DataError(
            f"dataloader does not accept {name}: it {_DECIDED[name]}; remove it, or pass your own loader to "
            "engine.batches()"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"dataloader cannot shard {type(dataset).__name__}: it has no __len__ or no __getitem__; split it by rank "
            "yourself "
            "(Hugging Face: datasets.distributed.split_dataset_by_node) and pass its loader to engine.batches()"
        )
    share = data_share_of(cfg, _topology())
    sampler = ShareSampler(
        len(dataset),
        cfg.training.micro_batch_size,
        rank=share.number,
        world_size=share.of,
        seed=cfg.training.seed,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    return ShareLoader(
        dataset,
        sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        generator=generator,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
    )


def _topology() -> Topology:
    """Of the process group; before `prepare` has initialized it, of the launcher's variables."""
    if dist.is_initialized():
        return Topology(dist.get_world_size(), rank=dist.get_rank())
    return Topology.from_environment()
