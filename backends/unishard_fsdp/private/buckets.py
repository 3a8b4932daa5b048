"""DistributedDataParallel with a fixed order of gradient sums from the first update on."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


class FixedBuckets(DistributedDataParallel):
    """DDP with the same buckets from the first update on, in reverse order of the parameters.

    DDP rebuilds its buckets after the first backward, in the order in which gradients were computed (reducer.cpp,
    rebuild_buckets). The buckets determine in which order more than two ranks are summed, so the first update after
    resuming from a checkpoint would differ from that of an uninterrupted run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # DDP does not rebuild buckets then, and starts with the reverse order
            return parameters, sparse
        return parameters[::-1], sparse[::-1]
