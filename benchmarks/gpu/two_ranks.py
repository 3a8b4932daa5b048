"""Two ranks on one device against plain torch. NCCL refuses two ranks on one card, so the caller starts another process
group first.

Two transports: gloo's own CUDA side, and `staged`, which copies through host memory. What this torch's gloo cannot do
is found first, one collective at a time, and said; `staged` runs in any case.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from benchmarks.gpu import cells, staged
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size, side_by_side
from unishard.testing import oracle, run_ranks
from unishard.testing.cells import CLIP, Cell
from unishard.testing.models import MODELS


def one_card(device: str) -> dict[str, str]:
    """The environment of both ranks. What is visible is said, else `run_ranks` hides a card that two ranks would
    share.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible}


def wanted_cells(device: str) -> list[Cell]:
    models = list(MODELS) if full_size(device) else ["mlp"]
    strategies, precisions = ("full_shard", "shard_grad_op"), ("fp32", "bf16")
    return [Cell(model, *rest, world=2) for model, *rest in product(models, strategies, (2,), (CLIP,), precisions)]


def run(report: Report) -> None:
    wanted = wanted_cells(report.device)
    references = run_ranks(1, cells.expected, wanted, report.device, timeout=120)[0]
    env = one_card(report.device)
    for transport in ("gloo", "staged"):
        probing = (probe, transport, report.device)
        found = attempt(
            report, f"{transport}: collectives", lambda work=probing: run_ranks(2, *work, timeout=120, env=env)[0]
        )
        missing = {name: why for name, why in (found or {}).items() if why}
        for name, why in missing.items():
            if transport == "staged":
                report.check(f"staged: {name}", False, why)
            else:
                report.unsupported(f"gloo: {name}", f"torch {torch.__version__}: {why}")
        if found is not None and not missing:
            report.check(f"{transport}: {', '.join(found)} on {report.device}", True)
        side_by_side(
            report.device,
            [partial(train, report, transport, backend, wanted, references, missing) for backend in BACKENDS],
        )


def train(
    report: Report,
    transport: str,
    backend: str,
    wanted: list[Cell],
    references: dict[Cell, oracle.Curve],
    missing: dict[str, str],
) -> None:
    name, env = f"{backend} over {transport}", one_card(report.device)
    work = (measure, transport, report.device, backend, wanted)
    if missing and transport == "gloo":
        try:
            answers = run_ranks(2, *work, timeout=150, env=env)
        except AssertionError as failure:  # RankFailure
            report.unsupported(
                name, f"torch {torch.__version__} lacks {', '.join(missing)} on gloo: {str(failure).splitlines()[0]}"
            )
            return
    else:
        answers = attempt(report, f"{name}: ran", lambda: run_ranks(2, *work, timeout=150, env=env))
    if answers is not None:
        report.check(f"{name}: both ranks report the same", repr(answers[0]) == repr(answers[1]))
        cells.judge(report, f"{backend} over {transport}", wanted, answers[0], references)


def start(transport: str, device: str) -> torch.device:
    """What a user's script would do before `prepare`."""
    if torch.cuda.is_available() is not (device == "cuda"):
        raise RuntimeError(f"asked for {device}, and torch sees {torch.cuda.device_count()} CUDA devices")
    if transport == "staged":
        staged.install()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group({"gloo": "cpu:gloo,cuda:gloo"}.get(transport, transport))
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def measure(transport: str, device: str, backend: str, wanted: list[Cell]) -> dict[Cell, oracle.Curve | str]:
    start(transport, device)
    return cells.measure(backend, wanted)


def probe(transport: str, kind: str) -> dict[str, str]:
    """What the engines call, on tensors of the device: why it does not work, or an empty text. Stops at the first that
    does not.
    """
    device, answers = start(transport, kind), {}
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two of them
    for name, call in _COLLECTIVES.items():
        try:
            got, expected = call(device)
            torch.testing.assert_close(got.cpu(), expected)
            answers[name] = ""
        except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
            answers[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            break
    return answers


Result = tuple[torch.Tensor, torch.Tensor]


def _mine(device: torch.device, numel: int) -> torch.Tensor:
    return torch.arange(numel, device=device, dtype=torch.float32) + dist.get_rank()


def _all_reduce(device: torch.device) -> Result:
    tensor = _mine(device, 4)
    dist.all_reduce(tensor)
    return tensor, torch.arange(4.0) * 2 + 1


def _broadcast(device: torch.device) -> Result:
    tensor = _mine(device, 4)
    dist.broadcast(tensor, 0)
    return tensor, torch.arange(4.0)


def _all_gather(device: torch.device) -> Result:
    output = torch.empty(8, device=device)
    dist.all_gather_into_tensor(output, _mine(device, 4))
    return output, torch.cat([torch.arange(4.0), torch.arange(4.0) + 1])


def _reduce_scatter(device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, part: float = 1.0) -> Result:
    output = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(output, _mine(device, 8), op=op)
    return output, (torch.arange(8.0) * 2 + 1)[4 * dist.get_rank() :][:4] * part


_COLLECTIVES: dict[str, Callable[[torch.device], Result]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor with AVG": lambda device: _reduce_scatter(device, dist.ReduceOp.AVG, 0.5),
}
