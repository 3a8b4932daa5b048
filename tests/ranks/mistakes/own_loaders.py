"""Loaders that people bring: which samples each rank reads, in which order, and how many at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from playing import checked as config
from playing import my_rank, prepare
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import unishard
from mistakes.data import DATA, read, samples, warnings_raised

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

_WRONG_SHARES = (
    "DataError: DistributedSampler does not give each of the 2 ranks its own share: rank 0 reads share 0 of {0}, rank "
    "1 reads share {1} of {0}; give it neither num_replicas nor rank, which it takes from the process group, or use "
    "unishard.dataloader(dataset, cfg)"
)
_OTHER_SIZE = (
    "{} has batches of 4, and training.micro_batch_size is 2; write batch_size=cfg.training.micro_batch_size in the "
    "script, or training.micro_batch_size: 4 in the config"
)


@DATA.raises(
    "a list or generator of batches of another size than `training.micro_batch_size`",
    f"UserWarning: {_OTHER_SIZE.format('list')}",
    "other batches",
)
@DATA.raises(
    "the same where `training.global_batch_size` asks for a check",
    f"DataError: training.global_batch_size is 4, but {_OTHER_SIZE.format('DataLoader')}",
    "other batch size",
    4,
)
@DATA.raises(
    "`DataLoader(batch_size=4)` where `training.micro_batch_size` is 2",
    f"UserWarning: {_OTHER_SIZE.format('DataLoader')}",
    "other batch size",
)
@DATA.raises(
    "the same batches on every rank",
    "UserWarning: ranks 0 and 1 read the same first batch, so they train on the same samples; let each rank read its "
    "own: use "
    "unishard.dataloader(dataset, cfg), or give the DataLoader a DistributedSampler, or split the data by rank",
    "same batches",
)
@DATA.raises(
    "`unishard.dataloader` prepared by Accelerate",
    "DataError: the data are sharded twice, by Accelerate and unishard.dataloader: each rank reads one of 4 parts; use "
    "one of them",
    "prepared ours",
)
@DATA.raises(
    "a `DistributedSampler` in a loader that Accelerate prepares",
    "DataError: the data are sharded twice, by Accelerate and DistributedSampler: each rank reads one of 4 parts; use "
    "one of them",
    "prepared twice",
)
@DATA.raises("`DistributedSampler(num_replicas=4, ...)` on 2 ranks", _WRONG_SHARES.format(4, 1), "too many shares")
@DATA.raises("`DistributedSampler(num_replicas=2, rank=0)` on every rank", _WRONG_SHARES.format(2, 0), "one share")
@DATA.raises(
    "a `DataLoader` without a sampler on several ranks",
    "UserWarning: each of the 2 ranks reads the entire dataset through SequentialSampler, not its own share; use "
    "unishard.dataloader(dataset, cfg), or give the DataLoader a DistributedSampler",
    "no sampler",
)
def own_loader(backend, name, global_batch_size=None):
    cfg = config(backend, training={"global_batch_size": global_batch_size})
    with prepare(cfg) as engine, warnings_raised():
        read(engine, LOADERS[name](cfg))


@DATA.raises(
    "a new `DataLoader` with a generator of the same seed in each epoch",
    "UserWarning: the DataLoader reads the samples in the same order as in the last epoch; its generator has the same "
    "seed again: make it once, before the loop over epochs",
    "generator",
)
@DATA.raises(
    "no `set_epoch` on a `DistributedSampler`",
    "UserWarning: the DataLoader reads the samples in the same order as in the last epoch; its DistributedSampler is "
    "still at epoch 0: call set_epoch(epoch) on it before each epoch",
    "sampler",
)
def same_order(backend, kind):
    data, sampler = samples(16)[my_rank() :: 2], DistributedSampler(_ALL)
    with prepare(config(backend)) as engine, warnings_raised():
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            own = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
            read(engine, own if kind == "generator" else DataLoader(_ALL, batch_size=2, sampler=sampler))


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
    "Accelerate": (lambda: _by_accelerate(DataLoader(_ALL, batch_size=2, shuffle=True)), range(16)),
    "Accelerate, batches split": (
        lambda: _by_accelerate(DataLoader(_ALL, batch_size=4), split_batches=True),
        range(16),
    ),
    "list by number of tokens": (lambda: list(DataLoader(_ALL, batch_sampler=_ByTokens())), range(8)),
}


@DATA.harmless(
    "loaders that give each rank its share: a `DistributedSampler`, a `batch_sampler` by number of tokens, a dataset "
    "that is split by rank, a loader that Accelerate has prepared",
    "they are read as they are, without a warning",
)
def right_loaders(backend):
    got, right = [], []
    for build, expected in RIGHT.values():
        with prepare(config(backend)) as engine, warnings_raised():
            mine = read(engine, build())
        everyones = [mine, mine]
        dist.all_gather_object(everyones, mine)
        got += sorted(everyones[0] + everyones[1])
        right += expected
    return got, right
