"""DistributedDataParallel that adds up gradients in one order from the first update on."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["FixedBuckets"]


class FixedBuckets(DistributedDataParallel):
    """DDP that reduces in the same buckets from the first update on, those of the parameters from the last to the first.

    DDP itself begins with one bucket and makes them anew after the first backward, in the order in which the gradients came (reducer.cpp,
    rebuild_buckets). The bucket decides in which order more than two ranks are added up, so a run that goes on from a checkpoint would
    differ in its first update from the one that was not interrupted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # makes no buckets anew, and begins with those of the reversed order
            return parameters, sparse
        return parameters[::-1], sparse[::-1]
