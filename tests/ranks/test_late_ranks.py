"""A rank that is late in its own code is waited for, however long and wherever that is, and is named once a call."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, checked, heard, my_rank, own_share, until, update

import unishard
from unishard.failures import heartbeat
from unishard.testing import RankFailure, run_ranks
from unishard.testing.models import MODELS

pytestmark = pytest.mark.ranks

TIMEOUT = 0.2
"""`communication.desync_timeout`."""
LATE = 1.4
"""Seconds: longer than any check waits, which is six times that."""
NAMED = 60.0
"""Seconds until a late rank is named, on a machine that is busy."""
REPORT = re.compile(r"for other ranks: .*rank 1 .*(test_late_ranks|\.batches)")
WHEN = {"first": 0, "later": 11}
"""Updates before; the calls of the later one are not compared with those of other ranks."""

EVERY = 9
"""Updates between two automatic saves."""
CASES = [*zip(BACKENDS, WHEN, strict=True)]


class Loop:
    """A run in which ranks are late, once in each place."""

    def __init__(self, engine: Any, folder: str) -> None:
        self.engine, self.folder = engine, folder
        self.late = self.until_named = False
        self.report = Path(folder, "report")
        """A file that is there once this rank was named as late."""

    def sleep(self, *_: Any) -> None:
        """Be late, if it is this rank's turn: where it is the only one, until it was named."""
        if self.late:
            self.late = False
            time.sleep(LATE)
            if self.until_named:
                until(self.report.exists, NAMED)

    def note(self, record: logging.LogRecord) -> bool:
        """As a filter of the logger, leave the file where the message names the late rank."""
        if REPORT.search(record.getMessage()):
            self.report.touch()
        return True

    def update(self, batch: Any = None) -> Any:
        """One update."""
        return update(self.engine, batch or own_share(1)[0])


class Samples(torch.utils.data.Dataset):
    """One batch, read slowly."""

    def __init__(self, loop: Loop) -> None:
        self.sleep = loop.sleep

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        self.sleep()
        return own_share(1)[0]


def loads(loop: Loop, data: Any = None, **options: Any) -> None:
    loader = torch.utils.data.DataLoader(data or [own_share(1)[0]], batch_size=None, **options)
    for batch in loop.engine.batches(loader):
        loop.update(batch)


def reads_a_sample(loop: Loop) -> None:
    loads(loop, Samples(loop))


def reads_a_sample_in_a_worker(loop: Loop) -> None:
    loads(loop, Samples(loop), num_workers=1, multiprocessing_context="fork")


def starts_a_worker(loop: Loop) -> None:
    loads(loop, num_workers=1, multiprocessing_context="fork", worker_init_fn=loop.sleep)


def collates(loop: Loop) -> None:
    loads(loop, collate_fn=lambda batch: loop.sleep() or batch)


def streams(loop: Loop) -> None:
    def stream() -> Iterator[Any]:
        yield own_share(1)[0]
        loop.sleep()  # before it ends

    for batch in loop.engine.batches(stream()):
        loop.update(batch)


def computes(loop: Loop, *, training: bool = True) -> None:
    hook = loop.engine.module.blocks[0].register_forward_hook(loop.sleep)
    if training:
        loop.update()
    else:
        loop.engine.eval()
        with torch.no_grad():
            loop.engine.mean(loop.engine(**own_share(1)[0]).loss)
        loop.engine.train()
    hook.remove()


def evaluates(loop: Loop) -> None:
    computes(loop, training=False)


def computes_a_loss(loop: Loop) -> None:
    loss = loop.engine(**own_share(1)[0]).loss
    loop.sleep()
    loop.engine.backward(loss)
    loop.engine.step()


def looks_at_a_gradient(loop: Loop) -> None:
    loss = loop.engine(**own_share(1)[0]).loss
    loss.register_hook(loop.sleep)
    loop.engine.backward(loss)
    loop.engine.step()


def steps(loop: Loop) -> None:
    hook = loop.engine.optimizer.register_step_pre_hook(loop.sleep)
    loop.update()
    hook.remove()


def saves(loop: Loop) -> None:
    loop.engine.framework.on_save(loop.sleep)
    for _ in range(EVERY):
        loop.update()
    loop.engine.framework.on_save(lambda: None)


def loads_a_checkpoint(loop: Loop) -> None:
    name = next(iter(dict(loop.engine.module.named_parameters())))
    loop.engine.save(loop.folder)
    loop.engine.weights.read(name)
    loop.sleep()
    loop.engine.load(loop.folder)


def streams_weights(loop: Loop) -> None:
    for _ in loop.engine.weights.stream():
        loop.sleep()


def looks_at_gathered_weights(loop: Loop) -> None:
    with loop.engine.weights.gathered([name for name, _ in loop.engine.module.named_parameters()]):
        loop.sleep()


def waits_in_a_barrier(loop: Loop) -> None:
    loop.sleep()
    dist.barrier()


def tracks(loop: Loop) -> None:
    loop.engine.log(loss=loop.engine.mean(1.0))
    loop.sleep()


PLACES: tuple[Callable[[Loop], None], ...] = (
    reads_a_sample,
    reads_a_sample_in_a_worker,
    starts_a_worker,
    collates,
    streams,
    computes,
    evaluates,
    computes_a_loss,
    looks_at_a_gradient,
    steps,
    saves,
    loads_a_checkpoint,
    streams_weights,
    looks_at_gathered_weights,
    waits_in_a_barrier,
    tracks,
)


def late(folder: str, backend: str, when: str) -> list[tuple[str, float, list[str]]]:
    """By place, how long it took and what was said; rank 1 is late, in every third place both are."""
    heartbeat.TIMEOUTS = 200  # a busy machine may not let a process answer for so short a time
    saved = {"dir": folder, "every_steps": EVERY}
    cfg = checked(backend, communication={"desync_timeout": TIMEOUT}, checkpoint=saved)
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine, heard() as said:
        loop, found = Loop(engine, folder), []
        for batch in own_share(WHEN[when]):
            loop.update(batch)
        logging.getLogger("unishard").addFilter(loop.note)
        for number, place in enumerate(PLACES):
            began, loop.until_named = time.monotonic(), number % 3 != 2
            loop.late = my_rank() == 1 or not loop.until_named
            said.clear()
            place(loop)
            engine.mean(1.0)
            loop.report.unlink(missing_ok=True)
            engine.mean(1.0)
            found.append((place.__name__, time.monotonic() - began, [*said]))
    return found


@cache
def played() -> dict[tuple[str, str], Any]:
    """Of each engine, in the first updates and in later ones; the ranks sleep most of the time."""

    def run(case: tuple[str, str]) -> Any:
        with TemporaryDirectory() as folder:
            return run_ranks(2, late, str(Path(folder)), *case, timeout=240)

    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_late_rank_ends_no_run_and_is_named(case):
    waiting, _ = played()[case]
    assert [name for name, *_ in waiting] == [place.__name__ for place in PLACES]
    for number, (name, seconds, said) in enumerate(waiting):
        assert seconds > LATE, (name, "was not late")
        assert number % 3 == 2 or any(map(REPORT.search, said)), (name, said)


def too_late(backend: str, own_group: bool) -> None:
    """Rank 1 comes after the timeout: of the config to a call that is compared, of the script's own process group to one
    that is not."""
    timeout = 4.0
    if own_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    limits = {"desync_timeout": 1.0} | ({} if own_group else {"timeout": timeout})
    with unishard.prepare(MODELS["mlp"].build(), checked(backend, communication=limits)) as engine:
        for batch in own_share(WHEN["later" if own_group else "first"] + 1):
            update(engine, batch)
        if my_rank() == 1:
            time.sleep(3 * timeout)
        update(engine, own_share(1)[0])


@pytest.mark.parametrize(("backend", "own_group"), [*zip(BACKENDS, (False, True), strict=True)])
def test_a_rank_later_than_the_timeout_ends_the_run_and_is_named_first(backend, own_group):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, too_late, backend, own_group, timeout=60)
    message = failure.value.errors[0].message
    assert message.startswith("rank 1 is at test_late_ranks.py:"), message
    assert "in too_late, outside unishard, later than communication.timeout allows (4 s); rank 0 is in " in message
