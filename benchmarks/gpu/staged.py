"""A process group whose collectives go through host memory, for several ranks on one GPU, which NCCL does not support.

`install()` registers the backend `staged`: tensors of any device are copied to the host, sent over gloo, and copied
back. Every collective is complete when it returns. Only for tests: it is slow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future


def install() -> None:
    """Make `init_process_group("staged")` known."""
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", _create, devices=["cpu", "cuda"])


def _create(store: Any, rank: int, size: int, timeout: Any) -> Staged:
    return Staged(store, rank, size, timeout)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Staged(dist.ProcessGroup):
    """What FSDP2, DeepSpeed and unishard call of a process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged", store), rank, size, timeout)

    def getBackendName(self) -> str:  # torch's name
        """What `dist.get_backend` says."""
        return "staged"

    def get_group_store(self) -> Any:
        """What the ranks of a group of gloo or NCCL meet in; a group in Python has none of its own."""
        return self._store

    @property
    def group_name(self) -> str:
        """Under which torch's functional collectives find it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """In place."""
        for tensor in tensors:
            tensor.copy_(self._sum(tensor, opts.reduceOp if opts else dist.ReduceOp.SUM))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """As many at once."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """To one rank; the others' tensors stay as they are."""
        for tensor in tensors:
            result = self._sum(tensor, opts.reduceOp)
            if self.rank() == opts.rootRank:
                tensor.copy_(result)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """From one rank."""
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            self._gloo.broadcast([host], opts).wait()
            tensor.copy_(host)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Into one tensor a rank."""
        for out, tensor in zip(outputs, inputs, strict=True):
            for place, part in zip(out, self._gather(tensor), strict=True):
                place.copy_(part)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.view(-1).copy_(torch.cat([part.reshape(-1) for part in self._gather(tensor)]))
        return _done(output)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """As many at once."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        output.copy_(self._sum(tensor, opts.reduceOp).reshape(-1).chunk(self.size())[self.rank()].view(output.shape))
        return _done(output)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """As many at once."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Of one tensor a rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_([self._sum(part, opts.reduceOp) for part in parts][self.rank()])
        return _done(outputs)

    # As torch 2.13 calls them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        self._gloo.barrier().wait()
        return _done([])

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        host = tensor.detach().cpu().contiguous()
        parts = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([parts], [host]).wait()
        return parts

    def _sum(self, tensor: Tensor, op: Any) -> Tensor:
        """The reduction of all ranks' tensors, on the host; 16-bit tensors are summed in their own dtype."""
        parts = self._gather(tensor)
        kind = getattr(op, "op", op)
        if kind == dist.ReduceOp.RedOpType.MAX:
            return torch.stack(parts).amax(0)
        if kind == dist.ReduceOp.RedOpType.MIN:
            return torch.stack(parts).amin(0)
        if kind not in (dist.ReduceOp.RedOpType.SUM, dist.ReduceOp.RedOpType.AVG):
            raise NotImplementedError(f"staged: {kind}")
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total / self.size() if kind == dist.ReduceOp.RedOpType.AVG else total
