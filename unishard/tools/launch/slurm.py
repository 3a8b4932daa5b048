"""The batch script of a Slurm job: one torchrun on each node, which meet at the first one. Pure but for `submit`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from signal import Signals

from unishard.config import Config
from unishard.errors import BackendError, ConfigError, Problem
from unishard.tools.launch.command import Host, Script, ShellText, command_of, environment_of, quoted

_COMMANDS = ("setup", "srun")
"""Entries of `launch.slurm` that are no options of sbatch."""
_ENDPOINT = ShellText("$head:$port")


def batch_script(
    cfg: Config, script: Script, handed_over: Mapping[str, str], name: str, *, program: Sequence[str] = ("torchrun",)
) -> str:
    """The script for sbatch.

    Args:
        cfg: The config.
        script: What the ranks run.
        handed_over: Environment variables that tell the script its config.
        name: Of the job.
        program: How torchrun is called.

    Raises:
        ConfigError: `launch` asks for what Slurm does otherwise.
    """
    if cfg.launch.rendezvous == "static":
        raise ConfigError(
            [Problem("launch.rendezvous", "one srun starts torchrun on all nodes alike; write c10d, not static")]
        )
    return "\n".join(_lines(cfg, script, handed_over, name, program)) + "\n"


def _lines(
    cfg: Config, script: Script, handed_over: Mapping[str, str], name: str, program: Sequence[str]
) -> Iterator[str]:
    launch = cfg.launch
    options: dict[str, int | str] = {
        "job-name": name,
        "nodes": str(launch.nodes).replace(":", "-"),
        "ntasks-per-node": 1,
    }
    options |= {"no-kill": ""} if launch.max_restarts else {}
    options |= launch.slurm
    yield "#!/bin/bash"
    for option, value in options.items():
        if option not in _COMMANDS:
            yield f"#SBATCH --{option}" if value == "" else f"#SBATCH --{option}={value}"
    yield ""
    if "setup" in launch.slurm:
        yield str(launch.slurm["setup"])
    for variable, value in {**handed_over, **environment_of(cfg)}.items():
        yield f"export {variable}={quoted(value)}"
    command = command_of(
        cfg, script, {}, Host(None if launch.endpoint else _ENDPOINT, ShellText("$SLURM_JOB_ID")), program=program
    )
    if launch.endpoint is None:
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield "port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node have different ones"
    yield ""
    words = list(map(quoted, command.words))
    if launch.min_nodes != launch.max_nodes:
        words[words.index(quoted(str(launch.nodes)))] = f'"{launch.min_nodes}:$SLURM_JOB_NUM_NODES"'
    # With restarts the other nodes go on when one fails; without them srun ends all.
    kill = "--no-kill --kill-on-bad-exit=0" if launch.max_restarts else "--kill-on-bad-exit=1"
    extra = f" {launch.slurm['srun']}" if "srun" in launch.slurm else ""
    start = f"srun {kill}{extra} {' '.join(words)}"
    yield from _requeued(cfg, start) if cfg.checkpoint.on_signal and cfg.checkpoint.dir else (start,)


def _requeued(cfg: Config, start: str) -> Iterator[str]:
    """Starts the ranks, and the job again if they have saved since; torchrun does not pass on their exit code."""
    latest = quoted(f"{cfg.checkpoint.dir}/latest")
    yield f"before=$(cat {latest} 2>/dev/null)"
    yield start
    yield "code=$?"
    yield f'if [ $code -ne 0 ] && [ "$(cat {latest} 2>/dev/null)" != "$before" ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"  # a signal has ended them after a save: go on from there'
    yield "fi"
    yield "exit $code"


def unheard_signal(cfg: Config) -> str | None:
    """What is said of a signal that Slurm is asked to send and that no rank saves at; None if there is none."""
    option = str(cfg.launch.slurm.get("signal", ""))
    word = option.rpartition(":")[2].partition("@")[0].upper().removeprefix("SIG")
    numbers = {str(signal.value): signal.name for signal in Signals}
    name = numbers.get(word, f"SIG{word}")
    if not word or name in cfg.checkpoint.on_signal:
        return None
    return (
        f"launch.slurm: Slurm sends {name} before it ends the job (signal={option}), and ranks save only at signals in "
        f"checkpoint.on_signal; add {name} there, unless the script handles it"
    )


def submit(text: str) -> str:
    """Submit a script with sbatch.

    Returns:
        The job's ID.

    Raises:
        BackendError: sbatch is missing or refuses the script.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BackendError(
            "sbatch is not on the PATH; submit on a login node of the cluster, or write the script with -o FILE"
        ) from None
    if done.returncode:
        raise BackendError(
            f"sbatch refuses the script ({done.stderr.strip()}); change launch.slurm, and see the script with --dry-run"
        )
    return done.stdout.strip().partition(";")[0]
