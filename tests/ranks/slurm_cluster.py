"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["slurm_cluster", "unavailable"]

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_CONFIG = """
ClusterName=unishard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str:
    """Why there can be no cluster here; empty if there can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        return f"{', '.join(missing)} not installed"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster, and end it.

    Args:
        folder: For its files; its path must be short, since sockets lie there.

    Yields:
        The environment of its commands.
    """
    environ = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    host, (controller, daemon) = socket.gethostname().partition(".")[0], _free_ports()
    text = _CONFIG.format(host=host, controller=controller, daemon=daemon, folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], env=environ, check=True)
    files = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}"
        for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    with ExitStack() as daemons:
        for words in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            daemons.callback(_stop, _started(words, environ, folder))
        _wait_for_node(environ, folder)
        yield environ


def _started(words: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{words[0]}.out").open("wb") as file:
        return subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_for_node(environ: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 30
    while True:
        said = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environ, capture_output=True, text=True, check=False
        )
        if said.stdout.strip() == "idle":
            return
        logs = "\n".join(
            path.read_text(errors="replace")[-2000:] for path in (*folder.glob("*.log"), *folder.glob("*.out"))
        )
        assert time.monotonic() < end, f"the node is not idle ({said.stdout}{said.stderr})\n{logs}"
        time.sleep(0.2)


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
