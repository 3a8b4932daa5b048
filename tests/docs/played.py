"""What ranks do with the blocks of a page; apart from the tests, which each rank would collect anew."""

from __future__ import annotations

import os
import re
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from fences import blocks

from unishard.cli import main


def launched(backend="fsdp"):
    """What `unishard launch` hands to a script: the first config of README, with another engine."""
    config = next(block.text for block in blocks("yaml") if block.page == "README.md")
    Path("train.yaml").write_text(config, encoding="utf-8")
    os.environ |= {"UNISHARD_CONFIG": "train.yaml", "UNISHARD_OVERRIDES": f'["backend={backend}"]'}


def run_source(source, folder):
    os.chdir(folder)
    if "unishard.load()" in source:
        launched()
    torch.manual_seed(int(os.environ["RANK"]))  # ranks that a launcher starts draw other numbers, forked ones the same
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the ranks pass different datasets")  # a page whose data have no seed
        exec(compile(source, "block", "exec"), {"__name__": "__main__"})


def run_readme(source, folder, backend):
    os.chdir(folder)
    launched(backend)
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(StringIO()) as printed:
        exec(compile(source, "README.md", "exec"), names)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)$", printed.getvalue(), re.MULTILINE)]
    assert names["engine"].is_main or not losses, "rank 0 prints"
    return type(names["engine"]._adapter).__module__.partition(".")[0], losses, names["step"].grad_norm


def run_script(arguments, folder):
    os.chdir(folder)
    sys.argv = arguments
    source = Path(arguments[0]).read_text(encoding="utf-8")
    with redirect_stdout(StringIO()) as printed:
        exec(compile(source, arguments[0], "exec"), {"__name__": "__main__", "__file__": arguments[0]})
    return printed.getvalue()


def run_command(words, folder):
    os.chdir(folder)
    programs = Path(sys.executable).parent
    os.environ |= {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "140", "NO_COLOR": "1"}
    with open("printed", "wb") as printed:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(printed.fileno(), stream.fileno())
    sys.argv = words
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
