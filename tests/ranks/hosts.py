"""Two hosts on this machine: network, process, mount and host name namespaces of their own, joined by a veth pair."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import forking

__all__ = ["Host", "two_hosts", "unavailable"]

_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
_CLONE_NEW = 0x40000000 | 0x04000000 | 0x00020000 | 0x20000000 | 0x08000000
"""The same, of linux/sched.h."""
_SETUP = """
hostname "$1"
mount --make-rprivate /
mount --bind "$2" /etc/hosts
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
# A host that is gone closes nothing; here its silence is noticed in seconds.
for each in time=2 intvl=1 probes=2; do echo "${each#*=}" > "/proc/sys/net/ipv4/tcp_keepalive_${each%=*}"; done
touch "$3"
exec sleep infinity
"""


@functools.cache
def unavailable() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run(
        [
            "unshare",
            *_NAMESPACES,
            "--fork",
            "sh",
            "-c",
            "mount --make-rprivate / && ip link add a0 type veth peer name b0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One of them."""

    def __init__(self, name: str, address: str, holder: subprocess.Popen[bytes], init: int) -> None:
        self.name, self.address = name, address
        self._holder, self._init = holder, init

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a script or a module of this Python on it; its output goes to a file."""
        command = [sys.executable, __file__, str(self._init), *words]
        with log.open("wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def lose(self) -> None:
        """Pull its cable, and end all its processes: the other host gets no packet that says so."""
        _ip("link", "set", "eth0", "down", host=self._init)
        self.stop()

    def stop(self) -> None:
        """End all its processes."""
        if self._holder.poll() is None:
            os.kill(self._init, signal.SIGKILL)
            self._holder.wait()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Hosts `left` and `right` with addresses of their own, that reach each other and nothing else.

    Args:
        folder: For files of the hosts.
    """
    addresses = {"left": "10.77.0.1", "right": "10.77.0.2"}
    table = folder / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    hosts: list[Host] = []
    try:
        for name, address in addresses.items():
            hosts.append(_host(name, address, table, folder / f"{name} is up"))
        left, right = (host._init for host in hosts)
        _ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(right), host=left)
        for host in hosts:
            _ip("addr", "add", f"{host.address}/24", "dev", "eth0", host=host._init)
            _ip("link", "set", "eth0", "up", host=host._init)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.stop()


def _host(name: str, address: str, table: Path, ready: Path) -> Host:
    with ready.with_suffix(".log").open("wb") as log:
        holder = subprocess.Popen(
            [
                "unshare",
                *_NAMESPACES,
                "--fork",
                "--kill-child=SIGKILL",
                "sh",
                "-euc",
                _SETUP,
                "sh",
                name,
                str(table),
                str(ready),
            ],
            stderr=log,
        )
    end = time.monotonic() + 10
    while not ready.exists():
        assert holder.poll() is None, "the namespaces cannot be set up"
        assert time.monotonic() < end, "the namespaces are not set up in time"
        time.sleep(0.02)
    (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    return Host(name, address, holder, int(child))


def _ip(*arguments: str, host: int) -> None:
    subprocess.run(["nsenter", "--target", str(host), "--net", "ip", *arguments], check=True)


def _enter(init: int, words: list[str]) -> int:
    """Be a program on a host; what is forked from here on has its process namespace too."""
    folder = os.getcwd()
    if ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(init), _CLONE_NEW):
        raise OSError(ctypes.get_errno(), "setns")
    os.chdir(folder)
    program = os.fork()
    if program == 0:
        forking.run(words)
    return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])


if __name__ == "__main__":
    sys.exit(_enter(int(sys.argv[1]), sys.argv[2:]) & 0xFF)
