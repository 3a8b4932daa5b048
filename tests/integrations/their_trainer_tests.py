"""Runs the trainer tests of transformers, unmodified, with its Trainer replaced by unishard's.

They are in its repository, not in its package; of the version that is installed:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    pip install parameterized optuna sentencepiece
    python tests/integrations/their_trainer_tests.py transformers

Prints how many tests of a file pass without unishard and how many of those on each engine, and to stderr what the others
say.
What needs the Hub fails without it too, and does not count. With `--launched`, the one process is started as by
torchrun, so that models are sharded as under several.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("", "_accelerator", "_callback", "_checkpointing", "_data", "_evaluation", "_hyperparameter", "_optimizers")
BACKENDS = ("fsdp", "deepspeed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """As a plugin of the pytest that runs them."""
    parser.addoption("--on", choices=BACKENDS, default=None)
    parser.addoption("--absent", action="append", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Replace the Trainers before the tests import them."""
    import transformers

    for name in config.getoption("absent"):
        setattr(transformers, name, None)
    if (backend := config.getoption("on")) is None:
        return
    import transformers.trainer
    import transformers.trainer_seq2seq

    for module, name in ((transformers.trainer, "Trainer"), (transformers.trainer_seq2seq, "Seq2SeqTrainer")):
        made = _on_unishard(getattr(module, name), {"backend": backend, "sharding": "full_shard"})
        setattr(module, name, made)
        setattr(transformers, name, made)


def _on_unishard(base: type, cfg: dict[str, str]) -> type:
    from unishard.integrations.transformers import UnishardMixin

    class OnUnishard(UnishardMixin, base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            says = kwargs.get("args") or next((each for each in args if hasattr(each, "deepspeed")), None)
            own = {} if getattr(says, "deepspeed", None) else {"unishard": cfg}
            super().__init__(*args, **own | kwargs)

    OnUnishard.__name__ = OnUnishard.__qualname__ = base.__name__
    return OnUnishard


def outcomes(file: Path, checkout: Path, backend: str | None, args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """For each test of a file: passed, failed or skipped; and why it failed."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    paths = (ROOT, ROOT / "backends", Path(__file__).parent, os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    if args.launched:
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-o", "log_cli=0"]
        command += ["-p", Path(__file__).stem, *(f"--absent={name}" for name in args.absent), f"--junitxml={report}"]
        command += [*([] if backend is None else [f"--on={backend}"]), *args.pytest, str(file.relative_to(checkout))]
        subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=False)
        if not report.is_file():
            return {}
        return dict(map(_outcome, ElementTree.parse(report).getroot().iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    failed = next((each for each in case if each.tag in ("failure", "error")), None)
    if failed is not None:
        return name, ("failed", failed.get("message", "").partition("\n")[0])
    return name, ("skipped" if case.find("skipped") is not None else "passed", "")


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of transformers")
    parser.add_argument("--only", nargs="+", default=FILES, help="endings of test_trainer*.py, such as _callback")
    parser.add_argument("--on", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--launched", action="store_true", help="shard: start the process as torchrun would")
    parser.add_argument("--port", type=int, default=29511, help="of the launched process")
    parser.add_argument("--absent", nargs="+", default=[], help="names the files import, and this version has no more")
    parser.add_argument("--pytest", nargs="+", default=[], help="further arguments, such as -k=callback")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    engines = "".join(f" of those on {each} |" for each in args.on)
    sys.stdout.write(f"| File | passes |{engines}\n|---|---|{'---|' * len(args.on)}\n")
    for ending in args.only:
        file = checkout / "tests/trainer" / f"test_trainer{ending}.py"
        plain = {name for name, (what, _) in outcomes(file, checkout, None, args).items() if what == "passed"}
        row = [str(len(plain))]
        for backend in args.on:
            found = outcomes(file, checkout, backend, args)
            lost = {name: found.get(name, ("", "did not run"))[1] for name in sorted(plain)}
            lost = {name: said for name, said in lost.items() if found.get(name, ("",))[0] != "passed"}
            row.append(str(len(plain) - len(lost)))
            sys.stderr.writelines(
                f"{backend}: {file.name}: {name}: {said or 'skipped'}\n" for name, said in lost.items()
            )
        sys.stdout.write(f"| `{file.name}` | {' | '.join(row)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
