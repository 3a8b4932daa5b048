"""What `unishard launch` checks between hosts before the script: silent when all is well, a line when not, and never
the end of a run."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch.distributed as dist

import unishard
from unishard.testing import run_ranks
from unishard.tools.doctor.before_script import check, main
from unishard.tools.launch import running
from unishard.tools.launch.command import Script, command_of

pytestmark = pytest.mark.ranks


STORES = []
"""Kept until the process ends: rank 0 serves its store to the other one, which may still wait for an answer."""


def hosts(folder):
    """Two hosts: all well, the other one late, no way to the others, and no store; each with the seconds that it
    took."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    STORES.append(store)
    environ = {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    found = {}

    def play(name, **more):
        store.set(f"{name}/{rank}", "1")
        store.wait([f"{name}/0", f"{name}/1"])
        began = time.monotonic()
        found[name] = (check(environ | {"TORCHELASTIC_RUN_ID": name} | more, seconds=2.0), time.monotonic() - began)

    play("well")
    play("again", TORCHELASTIC_RESTART_COUNT="1")
    play("late", GROUP_WORLD_SIZE="3")
    if rank:
        os.environ["GLOO_SOCKET_IFNAME"] = "nothing9"
    play("apart")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    environ["MASTER_PORT"] = "1"
    play("no store")
    store.set(f"end/{rank}", "1")
    store.wait(["end/0", "end/1"])
    return found


def test_hosts_are_checked_before_the_script(tmp_path):
    for rank, found in enumerate(run_ranks(2, hosts, str(tmp_path))):
        said = {name: text for name, (text, _) in found.items()}
        assert {name: said[name] for name in ("well", "again", "late")} == {"well": "", "again": "", "late": ""}
        assert said["apart"].startswith(f"host {rank} of 2 ("), said["apart"]
        assert "over gloo" in said["apart"]
        assert said["no store"].startswith(f"host {rank} of 2 (")
        assert "does not reach localhost:1: " in said["no store"]
        assert "--no-check leaves this out" in said["no store"]
        assert max(seconds for _, seconds in found.values()) < 10


def started(nodes, check):
    """What torchrun's agent is told to run."""
    told = []
    running.torchrun.run = told.append
    cfg = unishard.load({"launch": {"nodes": nodes, "processes_per_node": 2, "endpoint": "head:1"}})
    command = command_of(cfg, Script("pkg.train", ("--lr", "3"), module=True), {})
    assert running.run(command, cfg, 1, check=check) == 0
    (args,) = told
    return args.training_script, args.module, args.training_script_args


def as_main(folder):
    """The script is the main program, with its arguments and its folder."""
    os.chdir(folder)
    with open("said.py", "w") as file:
        file.write(
            "import beside, json, sys\njson.dump([__name__, sys.argv, beside.x, "
            "len(sys.modules['__main__'].__file__)], open('out', 'w'))\n"
        )
    with open("beside.py", "w") as file:
        file.write("x = 3\n")
    before = list(sys.path)
    for words in (["said.py", "-m", "a"], ["-m", "said", "b"]):
        main(words)
        with open("out") as file:
            yield json.load(file)
        sys.path[:] = before if words[0] != "-m" else sys.path
        sys.modules.pop("beside", None)


def what_is_started(folder):
    checked = [started(*cell) for cell in ((2, True), (2, False), (1, True))]
    sys.path.insert(0, "")
    return checked, list(as_main(folder))


def test_only_several_hosts_are_checked_and_the_script_is_the_main_program(tmp_path):
    ((two, off, one), (script, module)) = run_ranks(1, what_is_started, str(tmp_path))[0]
    assert two == ("unishard.tools.doctor.before_script", True, ["-m", "pkg.train", "--lr", "3"])
    assert off == one == ("pkg.train", True, ["--lr", "3"])
    assert script == ["__main__", ["said.py", "-m", "a"], 3, len("said.py")]
    assert module[:3] == ["__main__", [str(tmp_path / "said.py"), "b"], 3]
