"""Loaders that people bring: which samples each rank reads, in which order, and how many at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import checked as config
from harness import my_rank, prepare
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset

import unishard
from mistakes.data import read, samples, warnings_raised
from mistakes.mistake import mistake

_ALL = samples(16)


def _distributed(size=2, **options):
    return DataLoader(_ALL, batch_size=size, sampler=DistributedSampler(_ALL, **options))


def _by_accelerate(loader, **options):
    from accelerate import Accelerator, DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare_data_loader(loader)


def _batches(size, rank=None):
    """A list of this rank's batches."""
    return list(DataLoader(_ALL, batch_size=size, sampler=DistributedSampler(_ALL, rank=rank, shuffle=False)))


LOADERS = {
    "no sampler": lambda cfg: DataLoader(_ALL, batch_size=2),
    "one share": lambda cfg: _distributed(num_replicas=2, rank=0),
    "too many shares": lambda cfg: _distributed(num_replicas=4, rank=my_rank()),
    "prepared twice": lambda cfg: _by_accelerate(_distributed()),
    "prepared ours": lambda cfg: _by_accelerate(unishard.dataloader(_ALL, cfg)),
    "same batches": lambda cfg: _batches(2, rank=0),
    "other batch size": lambda cfg: _distributed(size=4),
    "other batches": lambda cfg: _batches(4),
}


@mistake("a list or generator of batches of another size than `training.micro_batch_size`", "other batches")
@mistake(
    "`DataLoader(batch_size=4)` where `training.micro_batch_size` is 2 and `training.global_batch_size` asks for a check",
    "other batch size",
    4,
)
@mistake("`DataLoader(batch_size=4)` where `training.micro_batch_size` is 2", "other batch size")
@mistake("the same batches on every rank", "same batches")
@mistake("`unishard.dataloader` prepared by Accelerate", "prepared ours")
@mistake("a `DistributedSampler` in a loader that Accelerate prepares", "prepared twice")
@mistake("`DistributedSampler(num_replicas=4, ...)` on 2 ranks", "too many shares")
@mistake("`DistributedSampler(num_replicas=2, rank=0)` on every rank", "one share")
@mistake("a `DataLoader` without a sampler on several ranks", "no sampler")
def own_loader(backend, name, global_batch_size=None):
    cfg = config(backend, "no_shard", training={"global_batch_size": global_batch_size})
    with prepare(cfg) as engine, warnings_raised():
        read(engine, LOADERS[name](cfg))


@mistake("a new `DataLoader` with a generator of the same seed in each epoch", "generator")
@mistake("no `set_epoch` on a `DistributedSampler`", "sampler")
def same_order(backend, kind):
    data, sampler = samples(16)[my_rank() :: 2], DistributedSampler(_ALL)
    with prepare(config(backend, "no_shard")) as engine, warnings_raised():
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            own = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
            read(engine, own if kind == "generator" else DataLoader(_ALL, batch_size=2, sampler=sampler))


class _Own(Dataset):
    """Runs code of its own for each sample."""

    def __len__(self):
        return len(_ALL)

    def __getitem__(self, index):
        return _ALL[index]


class _ByTokens:
    """A sampler of batches of different sizes, this rank's."""

    def __iter__(self):
        yield from ([0, 1, 2], [3]) if my_rank() else ([4], [5, 6, 7])

    def __len__(self):
        return 2


RIGHT = {
    "sampler": (_distributed, range(16)),
    "sampler of batches": (
        lambda: DataLoader(_ALL, batch_sampler=BatchSampler(DistributedSampler(_ALL), batch_size=2, drop_last=False)),
        range(16),
    ),
    "number of tokens": (lambda: DataLoader(_ALL, batch_sampler=_ByTokens()), range(8)),
    "split by rank": (lambda: DataLoader(_ALL[my_rank() :: 2], batch_size=2, shuffle=True), range(16)),
    "subsets by rank": (
        lambda: DataLoader(Subset(_Own(), torch.arange(16)[my_rank() :: 2]), batch_size=2, shuffle=True),
        range(16),
    ),
    "Accelerate": (lambda: _by_accelerate(DataLoader(_ALL, batch_size=2, shuffle=True)), range(16)),
    "Accelerate, batches split": (
        lambda: _by_accelerate(DataLoader(_ALL, batch_size=4), split_batches=True),
        range(16),
    ),
    "list by number of tokens": (lambda: list(DataLoader(_ALL, batch_sampler=_ByTokens())), range(8)),
}


@mistake(
    "loaders that give each rank its share: a `DistributedSampler`, a `batch_sampler` by number of tokens, a dataset that is split by rank, a loader that Accelerate has prepared"
)
def right_loaders(backend):
    got, right = [], []
    for build, expected in RIGHT.values():
        with prepare(config(backend, "no_shard")) as engine, warnings_raised():
            mine = read(engine, build())
        everyones = [mine, mine]
        dist.all_gather_object(everyones, mine)
        got += sorted(everyones[0] + everyones[1])
        right += expected
    return got, right
