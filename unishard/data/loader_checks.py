"""Checks that the ranks' loaders read the data once, in the batches that the config says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unishard.config import Training
from unishard.data.batches import Window
from unishard.data.digest import of_value
from unishard.data.epochs import Orders
from unishard.data.loader_facts import LoaderFacts, digest_of, facts_of
from unishard.errors import DataError

_INSTEAD = "use unishard.dataloader(dataset, cfg), or give the DataLoader a DistributedSampler"


class LoaderChecks:
    """Checks the loaders of one engine.

    Ranks are compared at the first pass in training mode, and at the first one in evaluation mode.
    """

    def __init__(self, training: Training, warn: Callable[[str], None], *, sharing: int = 1) -> None:
        """Check loaders.

        Args:
            training: The section.
            warn: Called with a warning.
            sharing: Neighboring ranks that share samples, whose batches are compared when they are split.
        """
        self._training = training
        self._sharing = sharing
        self._warn = warn
        self._compared: set[bool] = set()
        self._split_by_user = False
        """Whether the ranks were seen to hold different datasets, which people have split themselves."""
        self._first_window = False
        """Whether the next window is the first one in training mode, and compared between ranks."""
        self._facts: LoaderFacts | None = None
        """Of the loader whose batches' sizes are still to be seen."""
        self._sizes: list[int | None] = []
        self._orders = Orders()

    def begin(self, loader: Iterable[Any], *, training: bool, together: bool, updates: int) -> None:
        """Check a loader at the beginning of a pass. Collective if `together`.

        Args:
            loader: This rank's.
            training: Whether it is read in training mode.
            together: Whether all ranks begin a pass, so that they can be compared.
            updates: How many the engine has made.

        Raises:
            DataError: On every rank: ranks read the same share, the data are sharded twice, or batches have another
                size than the checked `training.global_batch_size` needs.
        """
        facts, self._first_window = facts_of(loader), False
        if together and training not in self._compared:
            self._compared.add(training)
            self._compare(facts._replace(dataset=digest_of(getattr(loader, "dataset", None))), training=training)
        readers = dist.get_world_size() // self._sharing
        if facts.whole is not None and readers > 1 and not self._split_by_user:
            ranks = f"{readers} ranks" if self._sharing == 1 else f"{readers} groups of ranks"
            self._warn(
                f"each of the {ranks} reads the entire dataset through {facts.whole}, not its own share; {_INSTEAD}"
            )
        if training:
            if problem := self._contradicted_batch_size([facts]):
                raise DataError(problem)
            self._facts, self._sizes = facts, []
            self._warn_of_batch_size(facts.batch_size, facts.name)
            if facts.order is not None and self._orders.repeats(getattr(loader, "dataset", None), facts.order, updates):
                self._warn(
                    f"the {facts.name} reads the samples in the same order as in the last epoch; {facts.reorder}"
                )

    def _compare(self, facts: LoaderFacts, *, training: bool) -> None:
        everyone: list[Any] = [facts] * dist.get_world_size()
        if len(everyone) > 1:
            dist.all_gather_object(everyone, facts)
            everyone = everyone[:: self._sharing]
        wrong = _wrong_shares(everyone)
        if wrong is not None and len(everyone) == 1:  # one of several runs may train on a share
            self._warn(wrong)
            wrong = None
        problem = wrong or (self._contradicted_batch_size(everyone) if training else None)
        if problem is not None:
            raise DataError(problem)
        digests = {rank_facts.dataset for rank_facts in everyone}
        differ = None not in digests and len(digests) > 1
        if differ and facts.ours:
            self._warn(
                "the ranks pass different datasets to unishard.dataloader, which gives each rank its share of one "
                "dataset; pass the same "
                "on every rank: not one that is split by rank, or shuffled or drawn without a seed"
            )
        self._split_by_user = self._split_by_user or differ
        is_divided = all(rank_facts.ours for rank_facts in everyone) or any(rank_facts.whole for rank_facts in everyone)
        self._first_window = training and len(everyone) > 1 and (not is_divided or self._split_by_user)

    def window(self, window: Window) -> None:
        """Check a window in training mode: the first ones of a pass. Collective for the first one."""
        if self._first_window:
            self._first_window = False
            self._warn_of_same_batch(window.unmoved[0])
        if self._facts is None:
            return
        if not self._facts.hides_batches or "micro_batch_size" not in self._training.model_fields_set:
            self._facts = None
            return
        self._sizes += map(_samples_in, window.unmoved[:2])
        if len(self._sizes) > 1:  # batches of changing size are made by a number of tokens
            if self._sizes[0] == self._sizes[1]:
                self._warn_of_batch_size(self._sizes[0], self._facts.name)
            self._facts = None

    # -- warnings ----------------------------------------------------------------------------------

    def _warn_of_batch_size(self, size: int | None, name: str) -> None:
        if size is not None and size != self._training.micro_batch_size:
            self._warn(self._other_batch_size(size, name))

    def _warn_of_same_batch(self, batch: Any) -> None:
        same = ranks_with_same(batch, self._sharing)
        if same is not None:
            self._warn(
                f"ranks {same[0]} and {same[1]} read the same first batch, so they train on the same samples; let each "
                f"rank read its own: {_INSTEAD}, or split the data by rank"
            )

    # -- batch sizes -------------------------------------------------------------------------------

    def _contradicted_batch_size(self, everyone: Sequence[LoaderFacts]) -> str | None:
        """The problem with a batch size that contradicts `training.global_batch_size`, which a user sets to check the
        product.
        """
        if self._training.global_batch_size is None:
            return None
        for rank, facts in enumerate(everyone):
            if facts.batch_size is not None and facts.batch_size != self._training.micro_batch_size:
                of_rank = f" of rank {rank}" if len({rank_facts.batch_size for rank_facts in everyone}) > 1 else ""
                text = self._other_batch_size(facts.batch_size, facts.name + of_rank)
                return f"training.global_batch_size is {self._training.global_batch_size}, but {text}"
        return None

    def _other_batch_size(self, size: int, name: str) -> str:
        is_ours = name.startswith("unishard.dataloader")
        write = (
            "pass it the config of unishard.prepare" if is_ours else "write batch_size=cfg.training.micro_batch_size"
        )
        return (
            f"{name} has batches of {size}, and training.micro_batch_size is {self._training.micro_batch_size}; "
            f"{write} in the script, or training.micro_batch_size: {size} in the config"
        )


def ranks_with_same(value: Any, sharing: int = 1) -> tuple[int, int] | None:
    """The first two ranks that pass the same tensors, numbers and text, of those that share no samples.

    None if there are none, or that is unknown. Collective.
    """
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, of_value(value))
    digests = digests[::sharing]
    counts = Counter(digest for digest in digests if digest is not None)
    same = next((digest for digest, count in counts.items() if count > 1), None)
    if same is None:
        return None
    first, second, *_ = (number * sharing for number, digest in enumerate(digests) if digest == same)
    return first, second


def _wrong_shares(everyone: Sequence[LoaderFacts]) -> str | None:
    """What is wrong with the shares that the ranks read; None if each sample is read by as many ranks as any other."""
    twice = next((facts.shares for facts in everyone if len(facts.shares) > 1), None)
    if twice is not None:
        sources = " and ".join(dict.fromkeys(share.source for share in twice))
        return (
            f"the data are sharded twice, by {sources}: each rank reads one of {prod(share.of for share in twice)} "
            "parts; use one of them"
        )
    shares = [facts.shares[0] for facts in everyone if facts.shares]
    if len(shares) < len(everyone):
        return None
    parts, readers = {share.of for share in shares}, Counter(share.number for share in shares)
    # Fewer shares than ranks may be right: each node has its own files, and its ranks share them.
    if len(parts) == 1 and set(readers) == set(range(min(parts))) and len(set(readers.values())) == 1:
        return None
    read = ", ".join(f"rank {rank} reads share {share.number} of {share.of}" for rank, share in enumerate(shares[:8]))
    instead = (
        "give it neither num_replicas nor rank, which it takes from the process group, or "
        if "Sampler" in shares[0].source
        else ""
    )
    ranks = "the only rank all the data" if len(shares) == 1 else f"each of the {len(shares)} ranks its own share"
    return f"{shares[0].source} does not give {ranks}: {read}; {instead}use unishard.dataloader(dataset, cfg)"


def _samples_in(batch: Any) -> int | None:
    """How many samples a batch has, if all its tensors agree on it and one has more dimensions; 1 may be packed
    samples.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = {len(tensor) if tensor.ndim else None for tensor in tensors}
    if len(sizes) != 1 or not any(tensor.ndim > 1 for tensor in tensors):
        return None
    (size,) = sizes
    return None if size == 1 else size
