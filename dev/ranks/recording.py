"""Records the collectives that an engine issues, and the model whose sizes make them countable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import unishard
from unishard.testing.models import MlpOutput

WINDOWS = 3
"""DDP arranges its buckets again in the second, DeepSpeed's stage 3 learns the order of modules in the first: the third
is as all later."""
ACCUMULATION = 2

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
_RENDEZVOUS = ("c10d::send", "c10d::recv_")
"""By which ranks find each other in front of a call (`communication.desync_check`); no engine uses them."""
_COMPUTE = {"aten::gelu": "forward", "aten::gelu_backward": "backward"}


class Block(nn.Module):
    """280 elements, and one gelu, by which its forward and backward are seen between the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return added


class Countable(nn.Module):
    """Sizes that 2 ranks divide without padding: 40 + 3 x 280 + 36 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> MlpOutput:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


INPUT, BLOCK, HEAD = 40, 280, 36
PARAMETERS = INPUT + 3 * BLOCK + HEAD
LARGEST = 128
"""Elements of the largest parameter."""


class Event(NamedTuple):
    """A collective, or a block's compute."""

    phase: str
    """`forward 0`, `backward 0`, `step 0`, `forward 1` and so on, by micro-batch of the window."""
    kind: str
    numel: int
    """Elements of the whole: what an all-gather puts out, what a reduce-scatter takes in. 0 for compute."""
    dtype: str
    ranks: int = 0
    """Of the group; 0 where the operation does not say it."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every collective that passes torch's dispatcher, whoever calls it, also from autograd and from DDP's C++
    reducer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = ""
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _COMPUTE:
            self.events.append(Event(self.phase, _COMPUTE[name], 0, ""))
        elif "c10d" in func.namespace and name not in _RENDEZVOUS:
            kind = _KINDS.get(name.partition("::")[2], name)
            tensors = [tensor for part in args[:2] for tensor in (part if isinstance(part, list | tuple) else [part])]
            whole = max((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), key=torch.Tensor.numel)
            self.events.append(
                Event(self.phase, kind, whole.numel(), str(whole.dtype).removeprefix("torch."), _ranks_of(args))
            )
        return func(*args, **(kwargs or {}))


def _ranks_of(args: Any) -> int:
    groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
    return dist.ProcessGroup.unbox(groups[0]).size() if groups else 0


class Indexed(nn.Module):
    """The same behind a table of 12 x 4 elements, which is a unit, and of whose weights backward needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.rest = Countable()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> MlpOutput:
        found: MlpOutput = self.rest(x + self.table(labels), labels)
        return found


TABLE = 48


def record(cfg: Any, build: Callable[[], nn.Module] = Countable) -> list[Event]:
    """The third window of training the countable model, or another one that takes the same. Collective."""
    return record_and_train(cfg, build)[0]


def record_and_train(cfg: Any, build: Callable[[], nn.Module]) -> tuple[list[Event], list[tuple[float, float | None]]]:
    """As `record`, and this rank's loss and the gradient norm of each micro-batch. Collective."""
    torch.manual_seed(0)
    rank = unishard.Topology.from_environment().rank
    trained = []
    with unishard.prepare(build(), cfg) as engine:
        for window in range(WINDOWS):
            recorder = Recorder()
            with recorder:
                for turn in range(ACCUMULATION):
                    generator = torch.Generator().manual_seed(2 * (window * ACCUMULATION + turn) + rank)
                    x = torch.randn(2, 4, generator=generator)
                    labels = torch.randint(0, 4, (2,), generator=generator)
                    recorder.phase = f"forward {turn}"
                    loss = engine(x, labels).loss
                    recorder.phase = f"backward {turn}"
                    engine.backward(loss)
                    recorder.phase = f"step {turn}"
                    step = engine.step()
                    assert step.updated == (turn + 1 == ACCUMULATION)
                    trained.append((loss.item(), step.grad_norm))
        return recorder.events, trained


def moved(events: list[Event]) -> dict[str, dict[str, int]]:
    """Elements by phase and kind of collective; phases without a collective are left out."""
    total: dict[str, Counter[str]] = {}
    for event in events:
        if event.numel:
            total.setdefault(event.phase, Counter())[event.kind] += event.numel
    return {phase: dict(kinds) for phase, kinds in total.items()}


def sizes(events: list[Event], kind: str, phase: str) -> list[int]:
    """Elements of each collective of a kind in a phase, in order."""
    return [event.numel for event in events if event.kind == kind and event.phase == phase]
