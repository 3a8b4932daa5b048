"""What `torch.distributed` does with tensors of the device: the backend `nccl`, and gloo's part, which the CPU build
does not have."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["install"]


def install(device: Any) -> None:
    """Put the extension's communicator in the place of `ProcessGroupNCCL`.

    Args:
        device: The extension.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def moving(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        """What moves the bytes of one communicator."""
        return dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, timeout)

    class Options:
        """Of a communicator."""

        def __init__(self, is_high_priority_stream: bool = False, **_: Any) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = datetime.timedelta(minutes=10)
            self.config = SimpleNamespace()
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    class ProcessGroupNCCL(device.Communicator):  # type: ignore[name-defined,misc]
        """One communicator. Gloo moves its bytes, over the same store."""

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            timeout = getattr(options, "_timeout", datetime.timedelta(minutes=10))
            super().__init__(moving(store, rank, size, timeout), "nccl")
            self._options = options or Options()

        options = property(lambda self: self._options)
        NCCL_CTA_POLICY_ZERO = 2

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.bind(device.index)

        def _set_sequence_number_for_group(self) -> None: ...
        def _group_start(self) -> None: ...
        def _group_end(self) -> None: ...
        def _shutdown(self) -> None: ...
        def shutdown(self) -> None: ...
        def _abort(self) -> None:
            self.abort()

        def comm_split_count(self) -> int:
            return 0

        def _is_initialized(self) -> bool:
            return True

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    torch._C._nccl_version = lambda: 22809  # type: ignore[attr-defined]
    torch._C._nccl_version_suffix = lambda: b""  # type: ignore[attr-defined]
    torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined,misc]
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined,misc]
    distributed_c10d._NCCL_AVAILABLE = True

    register = dist.ProcessGroup._register_backend

    def registering(group: Any, where: torch.device, kind: Any, backend: Any) -> None:
        if where.type == "cuda" and isinstance(backend, dist.ProcessGroupGloo):
            gloo = moving(group.get_group_store(), group.rank(), group.size(), backend.options._timeout)
            # Under the same kind the group would take the first one for all devices.
            kind, backend = dist.ProcessGroup.BackendType.CUSTOM, device.Communicator(gloo, "gloo")
        register(group, where, kind, backend)

    dist.ProcessGroup._register_backend = registering  # type: ignore[method-assign]
