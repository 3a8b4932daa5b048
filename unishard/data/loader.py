"""A dataloader that gives each rank its share of the data: the same global batches for any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from unishard.config import Config, expect_config
from unishard.data.sampler import ShareSampler
from unishard.errors import DataError
from unishard.topology import Topology

__all__ = ["dataloader"]

_DECIDED = {
    "batch_size": "is training.micro_batch_size in the config",
    "sampler": "is decided here, so that every rank gets its share",
    "batch_sampler": "is decided here, so that every rank gets its share",
}


def dataloader(
    dataset: Dataset[Any],
    cfg: Config,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    **options: Any,
) -> StatefulDataLoader[Any]:
    """A torchdata `StatefulDataLoader` over this rank's share of a dataset, in micro-batches of the config's size.

    The order depends on `training.seed` and the epoch only. Micro-batch `i` of rank `r` of `W` is slice `i * W + r` of it, so
    the samples of an update are the same for any number of ranks that makes the same global batch. Each iteration is a new
    epoch with a new order. All ranks get the same number of micro-batches, all of them full.

    `state_dict()` and `load_state_dict()` resume in the middle of an epoch, on another number of ranks too, as long as the
    samples already read by all of them are whole rounds of micro-batches there.

    Args:
        dataset: Map-style: it has `__len__` and `__getitem__`. The same on all ranks.
        cfg: Supplies `training.micro_batch_size` and `training.seed`.
        shuffle: Whether each epoch has an order of its own; else it is the dataset's.
        drop_last: At the end of an epoch, leave out the samples that are too few to give each rank a full micro-batch. By
            default the ranks fill up with samples from the beginning of the order, as torch's `DistributedSampler` does.
        collate_fn: Makes a batch of a list of samples; left out, torch's default.
        num_workers: Processes that read ahead; 0 reads in this one.
        pin_memory: Whether batches lie in page-locked memory, which makes copies to a GPU faster; left out, where CUDA is there.
        options: Any other option of `StatefulDataLoader`.

    Raises:
        DataError: The dataset is iterable-style, empty, or too small for `drop_last`; or an option is one that the config decides.
    """
    expect_config(cfg)
    for name, why in _DECIDED.items():
        if name in options:
            raise DataError(f"dataloader takes no {name}: it {why}; remove it, or pass a loader of your own to engine.batches()")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"dataloader cannot divide {type(dataset).__name__} between the ranks: it has no length or no index; split it by rank "
            "yourself (Hugging Face: datasets.distributed.split_dataset_by_node) and pass its loader to engine.batches()"
        )
    rank, world = _place()
    sampler = ShareSampler(
        len(dataset),
        cfg.training.micro_batch_size,
        rank=rank,
        world_size=world,
        seed=cfg.training.seed,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    # Its own generator: drawing the workers' seeds from torch's global one would shift the model's random numbers.
    generator = torch.Generator().manual_seed(cfg.training.seed + rank)
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates. Nothing a user could change.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            **{"generator": generator, **options},
        )


def _place() -> tuple[int, int]:
    """Rank and number of ranks, also before `prepare` has started the process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    topology = Topology.from_environment()
    return topology.rank, topology.world_size
