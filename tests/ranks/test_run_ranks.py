"""`run_ranks`: order, the environment, and the four ways a rank can fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from unishard.config.topology import Topology
from unishard.testing import RankFailure, ranks, run_ranks


def _where(scale):
    return (
        os.getpid(),
        Topology.from_environment(),
        os.environ["MASTER_ADDR"],
        torch.get_num_threads(),
        torch.ones(2) * scale,
    )


def test_results_come_in_the_order_of_ranks_from_processes_that_look_started_by_torchrun():
    results = run_ranks(3, _where, 5)
    assert [topology for _, topology, *_ in results] == [Topology(3, 3, rank, rank, "torchrun") for rank in range(3)]
    assert len({os.getpid(), *(pid for pid, *_ in results)}) == 4
    assert [threads for *_, threads, _ in results] == [1, 1, 1]
    assert all(torch.equal(tensor, torch.full((2,), 5.0)) for *_, tensor in results)


def _inherited():
    costly = ("deepspeed", "torch._inductor.compile_fx", "unishard_deepspeed.build", "unishard_fsdp.build")
    return [name for name in costly if name not in sys.modules], len(os.listdir("/proc/self/task"))


def test_a_rank_starts_with_what_it_would_import_in_seconds_and_without_a_thread_of_the_server():
    assert run_ranks(2, _inherited) == [([], 1)] * 2


def _variable(name):
    return os.environ.get(name)


def test_the_callers_environment_of_this_moment_and_env_reach_the_ranks(monkeypatch):
    run_ranks(1, _variable, "PATH")  # the server is up from here on
    monkeypatch.setenv("UNISHARD_TEST", "late")
    assert run_ranks(2, _variable, "UNISHARD_TEST") == ["late", "late"]
    assert run_ranks(2, _variable, "UNISHARD_TEST", env={"UNISHARD_TEST": "given"}) == ["given", "given"]


def _sum_of_ranks():
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def test_ranks_can_talk_and_nobody_has_to_destroy_the_group():
    assert run_ranks(4, _sum_of_ranks) == [6.0] * 4


def _boom_on_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("boom on one")
    dist.barrier()


def test_the_failing_ranks_own_traceback_is_raised_and_its_peers_do_not_hang():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: ValueError: boom on one") as caught:
        run_ranks(2, _boom_on_one, timeout=60)
    assert 'raise ValueError("boom on one")' in str(caught.value)
    assert "_boom_on_one" in caught.value.errors[1].traceback
    assert caught.value.errors[1][:2] == ("ValueError", "boom on one")
    assert next(iter(caught.value.errors)) == 1
    assert time.monotonic() - start < 30


def _boom_everywhere():
    raise RuntimeError(f"rank {os.environ['RANK']}")


def test_every_ranks_error_is_there():
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, _boom_everywhere)
    assert {rank: error.message for rank, error in caught.value.errors.items()} == {
        0: "rank 0",
        1: "rank 1",
        2: "rank 2",
    }


def _hang_on_two():
    if os.environ["RANK"] == "1":
        raise_later()
    if os.environ["RANK"] == "2":
        wait_for_nothing()
    return "done"


def raise_later():
    time.sleep(0.2)


def wait_for_nothing():
    time.sleep(1000)


def test_a_hung_rank_is_killed_at_the_timeout_and_named_with_its_stack():
    run_ranks(1, _variable, "PATH")  # the server is up from here on
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 2 of 3 failed: Hung: no answer within 6 s; killed") as caught:
        run_ranks(3, _hang_on_two, timeout=6)
    assert time.monotonic() - start < 20
    assert caught.value.finished == (0, 1)
    assert "wait_for_nothing" in caught.value.errors[2].traceback
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("rank")]


def _die_on_zero(how):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        how_to_die[how]()
    time.sleep(1000)


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _leave():
    os._exit(7)


how_to_die = {"kill": _kill, "exit": _leave, "sys.exit": sys.exit}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "Died: the process ended with SIGKILL"),
        ("exit", "Died: the process ended with exit code 7"),
        ("sys.exit", "SystemExit"),
    ],
)
def test_a_dead_rank_is_noticed_at_once_and_not_at_the_timeout(how, said):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 0 of 2 failed: {said}") as caught:
        run_ranks(2, _die_on_zero, how, timeout=300, grace=1)
    assert time.monotonic() - start < 30
    assert caught.value.errors[1].type == "Hung"
    assert "after rank 0 failed" in caught.value.errors[1].message


def _unpicklable():
    return lambda: None


def test_a_result_that_cannot_travel_is_that_ranks_error():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, _unpicklable)


def _refuse():
    raise LookupError("not here")


class _OneWay:
    """Can be pickled, and not put together again."""

    def __reduce__(self):
        return _refuse, ()


class _Eof(_OneWay):
    def __reduce__(self):
        return _end_of_file, ()


def _end_of_file():
    raise EOFError("nothing left")


def _one_way_on_one(kind):
    return kind() if os.environ["RANK"] == "1" else "done"


@pytest.mark.parametrize(
    ("kind", "said"), [(_OneWay, "LookupError: .*: not here"), (_Eof, "EOFError: .*: nothing left")]
)
def test_a_result_that_cannot_be_read_again_is_that_ranks_error(kind, said):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1 of 2 failed: {said}") as caught:
        run_ranks(2, _one_way_on_one, kind)
    assert caught.value.finished == (0,)
    assert "cannot be unpickled" in caught.value.errors[1].message
    assert time.monotonic() - start < 4
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("rank")]


def test_a_function_that_cannot_travel_is_refused_before_anything_starts():
    with pytest.raises(Exception, match="pickle"):
        run_ranks(1, lambda: None)


@pytest.fixture
def devices(monkeypatch):
    """Pretends CUDA devices to this process; the ranks that it starts look for themselves."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def _sees():
    return os.environ.get("RANK"), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_fewer_devices_than_ranks_are_hidden_from_all_of_them(devices, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    devices(1)
    assert [shown[1:] for shown in run_ranks(2, _sees)] == [("", False)] * 2
    assert run_ranks(2, _variable, "DS_ACCELERATOR") == ["cpu"] * 2


def test_ranks_with_a_device_each_see_them_and_are_not_forked(devices, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    devices(1)
    assert [shown[1] for shown in run_ranks(1, _sees)] == [None]
    assert run_ranks(1, _variable, "DS_ACCELERATOR") == [None]


@pytest.mark.parametrize(
    ("count", "env", "cuda"),
    [(1, {}, False), (2, {}, True), (0, {}, False), (1, "0", True), (2, "", False), (0, "0", False)],
)
def test_the_caller_may_say_which_devices_the_ranks_see(devices, count, env, cuda):
    devices(count)
    given = {} if env == {} else {"CUDA_VISIBLE_DEVICES": env}
    assert ranks._uses_cuda(2, given) is cuda
    assert ranks._context(cuda=cuda).get_start_method() == ("spawn" if cuda else "forkserver")
