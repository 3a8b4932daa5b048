"""What `torch.cuda` asks of `torch._C`, which the CPU build does not have: devices, streams, events, statistics.

All names with an underscore are private to torch, as it is in 2.13.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["install"]

_GIB = 1 << 30
_NONE = (
    "emptyCache",
    "ipc_collect",
    "resetAccumulatedMemoryStats",
    "record_memory_history",
    "record_memory_history_legacy",
    "sleep",
)
"""Calls that have nothing to do here."""


class Properties:
    """Of one device. The name says what it is, so that no figure of it is taken for one of a GPU."""

    name = "NVIDIA H100 80GB HBM3 (simulated)"
    major, minor = 9, 0
    total_memory = 80 * _GIB
    multi_processor_count, warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 132, 32, 2048, 65536
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    L2_cache_size = 50 << 20
    is_integrated = is_multi_gpu_board = 0
    gcnArchName = ""

    def __init__(self, physical: int) -> None:
        self.uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"simulated-{physical}")


class Stream(torch.Stream):
    """`torch.cuda.Stream` on torch's stream of any accelerator."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    cuda_stream = property(lambda self: self.stream_id)
    _as_parameter_ = property(lambda self: ctypes.c_void_p(self.stream_id))

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __enter__(self) -> Stream:
        self._entered = torch.cuda.stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class Event(torch.Event):
    """`torch.cuda.Event` on torch's event of any accelerator."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def _index(device: Any) -> int:
    return torch.cuda._utils._get_device_index(device, optional=True)


def _stream(found: Any) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def _current_stream(device: Any = None) -> Stream:
    torch.cuda._lazy_init()
    return _stream(torch._C._accelerator_getStream(_index(device)))


def _default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.CUDA.value)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        torch._C._accelerator_setStream(stream)


def install(device: Any, visible: Callable[[], list[int]]) -> None:
    """Let `torch.cuda` find its device.

    Args:
        device: The extension.
        visible: Says the number of each visible device in its machine.
    """
    core, cuda = torch._C, torch.cuda
    core._has_cuda = True
    torch.version.cuda = "13.0"

    def count() -> int:
        if not cuda._initialized:  # CUDA reads the environment when it starts, not when torch is imported
            device.set_device_count(len(visible()))
        return int(device.device_count())

    def properties(index: int) -> Properties:
        return Properties(visible()[index])

    def statistics(index: int) -> dict[str, Any]:
        one = {"current": device.allocated(index), "peak": device.peak(index), "allocated": 0, "freed": 0}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {name: {"all": one} for name in names} | {"num_ooms": 0, "num_alloc_retries": 0}

    def free_and_total(index: Any) -> tuple[int, int]:
        return Properties.total_memory - device.allocated(_index(index)), Properties.total_memory

    answers = {
        "getDeviceCount": count,
        "init": count,
        "getDevice": device.get_device,
        "setDevice": device.set_device,
        "exchangeDevice": device.exchange_device,
        "maybeExchangeDevice": device.exchange_device,
        "isInBadFork": device.in_bad_fork,
        "synchronize": device.synchronize,
        "set_sync_debug_mode": device.set_sync_mode,
        "get_sync_debug_mode": device.get_sync_mode,
        "memoryStats": statistics,
        "resetPeakMemoryStats": device.reset_peak,
        "getAllocatorBackend": lambda: "native",
        "getArchFlags": lambda: "sm_80 sm_90 sm_100",
        "getCompiledVersion": lambda: 13000,
        "canDeviceAccessPeer": lambda one, other: True,
        "isCurrentStreamCapturing": lambda: False,
        "getCurrentRawStream": lambda index: core._accelerator_getStream(index).stream_id,
        "memorySnapshot": lambda *_: {
            "segments": [],
            "device_traces": [],
            "allocator_settings": {},
            "external_annotations": [],
        },
    }
    for name, answer in answers.items():
        setattr(core, f"_cuda_{name}", answer)
    for name in _NONE:
        setattr(core, f"_cuda_{name}", lambda *_, **__: None)
    core._cuda_CUDAAllocator_AllocatorState, core._set_cached_tensors_enabled = (
        object,
        lambda enabled: None,
    )  # torch._dynamo imports them
    core._get_device_properties = cuda._get_device_properties = properties
    cuda._exchange_device = device.exchange_device
    cuda._maybe_exchange_device = lambda index: device.exchange_device(
        index
    )  # torch._dynamo tells the two apart by identity
    cuda.is_current_stream_capturing = lambda: False
    cuda.default_generators = tuple(device.default_generators())
    cuda._cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
        cudaMemGetInfo=free_and_total,
        **dict.fromkeys(
            ("cudaHostRegister", "cudaHostUnregister", "cudaProfilerStart", "cudaProfilerStop"), lambda *_: 0
        ),
    )
    cuda.nvtx._nvtx = SimpleNamespace(
        **dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"), lambda *_: 0)
    )
    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    cuda.current_stream, cuda.default_stream, cuda.set_stream = _current_stream, _default_stream, _set_stream
    _storages(device)
    _reads_of_the_host(device)


def _storages(device: Any) -> None:
    """`UntypedStorage.resize_` and `clone`, which have no way to the device in the CPU build."""
    plain_resize, plain_clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def as_bytes(storage: Any, size: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        device.resize_storage(as_bytes(self, 0), size)
        return self

    def clone(self: Any) -> Any:
        return (
            as_bytes(self, self.nbytes()).clone().untyped_storage() if self.device.type == "cuda" else plain_clone(self)
        )

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = resize, clone


def _reads_of_the_host(device: Any) -> None:
    """Reads of pinned memory that call no operator."""

    def read(name: str) -> None:
        plain = getattr(torch.Tensor, name)

        def reading(self: Any, *given: Any, **named: Any) -> Any:
            if type(self) is torch.Tensor and self.device.type == "cpu":
                device.host_reads(self, name)
            return plain(self, *given, **named)

        setattr(torch.Tensor, name, reading)

    for name in ("numpy", "tolist", "__array__"):
        read(name)
