"""Gathers the wheels that a machine with a GPU and no network may lack. Run it where there is a network.

    python -m benchmarks.gpu.wheels .wheels --python 3.12

torch, transformers and what they need must be there already; everything else that unishard and DeepSpeed import is
gathered. DeepSpeed comes as a source archive, from which a wheel without compiled ops is built: unishard needs none of
them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

LIMIT_MIB = 50
_ROOT = Path(__file__).resolve().parents[2]
_DEEPSPEED = "deepspeed==0.19.8"
_DEEPSPEED_NEEDS = ("hjson", "msgpack", "ninja", "py-cpuinfo", "einops", "psutil")
_GLIBC = (39, 36, 35, 34, 31, 28, 27, 24, 17)
"""Of the manylinux tags, the newest first; pip matches each exactly."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python of the machine with the GPU; default: 3.12")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.whl"):
        old.unlink()
    download([*own_requirements(), *_DEEPSPEED_NEEDS], given.folder, given.python)
    build_deepspeed(given.folder)
    size = sum(path.stat().st_size for path in given.folder.glob("*.whl")) / 2**20
    print(f"{len(list(given.folder.glob('*.whl')))} wheels, {size:.1f} MiB, in {given.folder}")
    if size > LIMIT_MIB:
        print(f"that is more than {LIMIT_MIB} MiB", file=sys.stderr)
    return 1 if size > LIMIT_MIB else 0


def own_requirements() -> list[str]:
    """What unishard itself needs."""
    return list(tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])


def pinned(requirement: str) -> str:
    """A requirement at the version that is tested, where `constraints.txt` names one."""
    name = re.split(r"[<>=!~\[ ]", requirement)[0].lower()
    lines = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.lower().startswith(f"{name}==")), requirement)


def download(requirements: list[str], folder: Path, python: str) -> None:
    """Wheels for another Python than this one, with all that they need."""
    platforms = [word for minor in _GLIBC for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "--platform", "manylinux2014_x86_64"]
    subprocess.run([*command, *(pinned(each) for each in requirements)], check=True)


def build_deepspeed(folder: Path) -> None:
    """A wheel in pure Python."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([*command, pinned(_DEEPSPEED)], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})


if __name__ == "__main__":
    sys.exit(main())
