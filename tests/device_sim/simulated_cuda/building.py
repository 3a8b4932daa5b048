"""Builds the extension with torch's own builder, once for each torch, Python and version of the sources.

python -m simulated_cuda.building prints the folder, or says why there is none and exits with 1.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["NAME", "TORCH", "built", "folder", "missing"]

NAME = "simulated_cuda_device"
TORCH = "2.13."
"""The version on which it is known to build and run; what it uses of torch is private."""
SOURCES = Path(__file__).parent / "source"
_UNITS = (
    ("counts", "order", "streams", "memory", "device", "signatures", "kernels", "tensors"),
    ("nccl", "collectives", "module"),
)
"""Files that are compiled together, one unit a core: most of the time goes into torch's headers."""
_ENTRY_POINT = "[torch.backends]\nsimulated_cuda = simulated_cuda:autoload\n"
"""torch calls it at the end of `import torch`, in every process that finds this folder."""


def missing() -> str | None:
    """What a build needs and this machine lacks, in a line; None if nothing."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the simulated device needs a C++ compiler, and {compiler} was not found"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated device needs Python.h (Debian, Ubuntu: apt install python3-dev)"
    if shutil.which("ninja") is None:
        return "the simulated device needs ninja, with which torch builds extensions"
    torch = find_spec("torch")
    if (
        torch is not None
        and torch.origin is not None
        and Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()
    ):
        return f"the simulated device needs a CPU build of torch, and this one (torch {version('torch')}) has CUDA"
    return None


def folder() -> Path:
    """Where the extension of this torch and this Python is, or will be."""
    root = os.environ.get("DEVICE_SIM_CACHE") or Path(__file__).parents[3] / ".device-sim"
    return Path(root, f"torch-{version('torch')}-{sys.implementation.cache_tag}")


def built() -> Path:
    """Build what is not there. The extension is loaded into this process, which must not need its torch for anything
    else.

    Raises:
        RuntimeError: The compiler refused, with its first lines.
    """
    place, ready = folder(), folder() / "ready"
    if ready.exists() and ready.stat().st_mtime > max(path.stat().st_mtime for path in SOURCES.iterdir()):
        return place
    from torch.utils import cpp_extension

    place.mkdir(parents=True, exist_ok=True)
    units = [place / f"unit_{names[0]}.cpp" for names in _UNITS]
    for unit, names in zip(units, _UNITS, strict=True):
        text = "".join(f'#include "{SOURCES / name}.cpp"\n' for name in names)
        if not unit.exists() or unit.read_text() != text:  # ninja looks at the time
            unit.write_text(text)
    cpp_extension.load(
        NAME,
        [str(unit) for unit in units],
        extra_cflags=["-O0", "-std=c++20", "-w", "-DNDEBUG"],  # classes of torch have more members without NDEBUG
        build_directory=str(place),
        is_python_module=False,
    )
    info = place / "simulated_cuda-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 1\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    ready.touch()
    return place


if __name__ == "__main__":
    if (why := missing()) is not None:
        sys.exit(why)
    sys.stdout.write(f"{built()}\n")
