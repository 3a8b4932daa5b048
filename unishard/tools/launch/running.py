"""Runs the ranks of this host with torchrun's agent, in this process, and says how they have ended."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from unishard.config import Config
from unishard.errors import BackendError, ConfigError, Problem, RankMismatchError
from unishard.failures import launcher
from unishard.tools.launch.command import Script, TorchrunCommand, environment_of

_PATIENCE, _ATTEMPT = 10.0, 5.0
"""Seconds until this process looks whether anything answers where the hosts meet, and that it may take."""
PREEMPTED = 85
"""How ranks exit that have saved after a signal of `checkpoint.on_signal`."""
_CHECKED = "unishard.tools.doctor.before_script"
"""The module that checks the hosts before it runs the script."""
_AGENT = "torch.distributed.elastic.agent.server.api"
_QUIET = ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
_SIGNALS = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGABRT: "; if it wrote that gloo received another size, ranks ran different modules: see "
    "sharding.conditional_modules",
}
"""Why ranks are killed by a signal that they do not explain."""
_RESTART = re.compile(r"(\d+)/(\d+) attempts left; will restart")


def gpus() -> int:
    """The number of GPUs that this process sees."""
    return torch.cuda.device_count()


def run(command: TorchrunCommand, cfg: Config, options: int, *, check: bool = True) -> int:
    """Start the ranks of this host and wait for them.

    Where there are several hosts, one rank of each first checks that they reach each other: for a few seconds, and
    silently if they do.

    What ranks write goes to this process's streams. torchrun's own messages are left out unless the environment
    variable LOGLEVEL asks for them. Ctrl-C and SIGTERM end all ranks.

    Args:
        command: Of torchrun.
        cfg: The config.
        options: Number of the command's first words that call torchrun.
        check: Whether several hosts are checked.

    Returns:
        The exit status: 0, that of the rank that failed first (128 plus the signal if one killed it), 85 if the ranks
        have saved after a signal and should be started again, or 128 plus the signal that ended this process.

    Raises:
        BackendError: The hosts cannot meet.
    """
    os.environ.update(command.environment)
    os.environ[launcher.VARIABLE] = launcher.this_process()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, with a warning
    _be_quiet()
    newest = _newest(cfg)
    args = torchrun.get_args_parser().parse_args(command.words[options:])
    if check and cfg.launch.max_nodes > 1:
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = _CHECKED, True
    silent = threading.Timer(_PATIENCE, _say_if_silent, (args.rdzv_endpoint,))
    silent.daemon = True
    if cfg.launch.max_nodes > 1:
        silent.start()
    try:
        torchrun.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return _failed(error)
    except SignalException as error:
        _say(f"ended all ranks after {signal.Signals(error.sigval).name}")
        saved = signal.Signals(error.sigval).name in cfg.checkpoint.on_signal and _newest(cfg) != newest
        return PREEMPTED if saved else 128 + int(error.sigval)
    except RendezvousError as error:
        where = cfg.launch.endpoint or args.rdzv_endpoint
        problem = f"the hosts cannot meet at {where} ({type(error).__name__}: {error})"
        hint = (
            "start the same command on every host, and let them reach that port; launch.rendezvous_options sets how "
            "long they wait"
        )
        raise BackendError(f"{problem}; {hint}") from None
    finally:
        silent.cancel()
    return 0


def _say_if_silent(endpoint: str) -> None:
    """Say that the hosts cannot meet yet, which torchrun waits for without a word (torch 2.13, 15 minutes by
    default).
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT).close()
    except OSError as error:
        _say(
            f"waits for {endpoint}, where nothing answers ({error}); check that the same command runs on that host, "
            "and that this one can reach the port"
        )


def _failed(error: ChildFailedError) -> int:
    rank, failure = min(error.failures.items(), key=lambda entry: _weight(entry[1]))
    if failure.exitcode >= 0:
        if failure.exitcode != PREEMPTED:
            _say(
                f"rank {rank} has ended with exit code {failure.exitcode}{_because(failure)}; its own message is above"
            )
        return int(failure.exitcode)
    number = signal.Signals(-failure.exitcode)
    _say(f"rank {rank} was killed by {number.name}{_SIGNALS.get(number, '')}")
    return 128 + number


def _because(failure: ProcessFailure) -> str:
    """Why a rank has ended that followed another one: torchrun lists no rank that is still about to end."""
    text = failure.message["message"] if isinstance(failure.message, dict) else ""
    kind, _, cause = text.partition(": ")
    return f" because {cause}" if kind == RankMismatchError.__name__ else ""


def _weight(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
    """By how much a failure explains others: torchrun ends ranks with SIGTERM, ranks end because another one has, and
    some say nothing.
    """
    followed, silent = RankMismatchError.__name__ in str(failure.message), isinstance(failure.message, str)
    return failure.exitcode == -signal.SIGTERM, followed, silent, failure.timestamp


def _newest(cfg: Config) -> Any:
    """The name of the newest checkpoint and when it was written; None without one."""
    if cfg.checkpoint.dir is None:
        return None
    path = Path(cfg.checkpoint.dir) / "latest"
    try:
        return path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
    except OSError:
        return None


def _say(text: str) -> None:
    sys.stderr.write(f"unishard launch: {text}\n")
    sys.stderr.flush()


class _Restarts(logging.Filter):
    """Passes nothing on, and says when the ranks are started anew."""

    def filter(self, record: logging.LogRecord) -> bool:
        if match := _RESTART.search(record.getMessage()):
            left, total = map(int, match.groups())
            _say(f"starts all ranks anew (restart {total - left + 1} of {total})")
        return False


def _be_quiet() -> None:
    if "LOGLEVEL" in os.environ:
        return
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.startswith(_QUIET):
            logger.setLevel(logging.CRITICAL + 1)
    agent = logging.getLogger(_AGENT)
    agent.setLevel(logging.INFO)
    agent.addFilter(_Restarts())


# --------------------------------------------------------------------------------------------------
# Runs a script on the workers of Ray Train's TorchTrainer, which takes the place of torchrun.


def plan_for_ray(cfg: Config, script: Script, handed_over: Mapping[str, str]) -> dict[str, Any]:
    """What is passed to Ray, as plain values.

    Args:
        cfg: The config.
        script: What each worker runs.
        handed_over: Environment variables that tell the script its config.

    Raises:
        ConfigError: The number of workers is not known.
    """
    launch = cfg.launch
    if launch.processes_per_node is None:
        raise ConfigError(
            [Problem("launch.processes_per_node", "is needed to ask Ray for as many workers; write a number")]
        )
    least, most = (nodes * launch.processes_per_node for nodes in (launch.min_nodes, launch.max_nodes))
    return {
        "address": launch.endpoint,
        "num_workers": most if least == most else (least, most),
        "max_failures": launch.max_restarts,
        "environment": {**handed_over, **environment_of(cfg)},
        "script": script.name if script.module else str(Path(script.name).resolve()),
        "arguments": list(script.arguments),
        "module": script.module,
        "folder": str(Path.cwd()),
    }


def run_on_ray(asked: Mapping[str, Any]) -> int:
    """Run a plan on the Ray cluster at its address, on a running one of this host, or on a new one of this host; wait
    for its end.

    Returns:
        The exit status: 0, or 1 if a worker has failed more often than `launch.max_restarts`.

    Raises:
        BackendError: Ray Train is not installed.
    """
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise BackendError(f"--ray needs Ray Train ({error}); pip install 'unishard[ray]'") from None
    if not ray.is_initialized():
        ray.init(address=asked["address"])
    trainer = TorchTrainer(
        _work,
        train_loop_config=dict(asked),
        scaling_config=ScalingConfig(
            num_workers=asked["num_workers"], use_gpu=ray.cluster_resources().get("GPU", 0) > 0
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=asked["max_failures"]),
            worker_runtime_env={"env_vars": dict(asked["environment"])},
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        sys.stderr.write(f"unishard launch: {error}\n")
        return 1
    return 0


def _work(asked: Mapping[str, Any]) -> None:
    """What each worker does: the script as its main program."""
    os.chdir(asked["folder"])
    sys.argv = [asked["script"], *asked["arguments"]]
    sys.path.insert(0, asked["folder"] if asked["module"] else str(Path(asked["script"]).parent))
    try:
        if asked["module"]:
            runpy.run_module(asked["script"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(asked["script"], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{asked['script']} has ended with exit code {end.code}") from end
