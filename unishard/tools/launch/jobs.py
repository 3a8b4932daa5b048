"""The manifest of a Kubernetes job: a PyTorchJob of Training Operator v1, or a TrainJob of Kubeflow Trainer 2.3.
Pure.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from signal import Signals
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.errors import BackendError, ConfigError, Problem
from unishard.tools.launch.command import Host, Script, ShellText, command_of, environment_of, quoted

_PORT = 23456
"""The port that the operator opens for workers (training-operator 1.9, pytorch defaults)."""
_GPU = "nvidia.com/gpu"


def manifest(cfg: Config, script: Script, handed_over: Mapping[str, str], name: str) -> Native:
    """The job as a mapping.

    Args:
        cfg: The config.
        script: What the ranks run; a path in the image, or on the mounted volume.
        handed_over: Environment variables that tell the script its config.
        name: Of the job, unless `launch.kubernetes` names it.

    Raises:
        ConfigError: A setting is missing.
    """
    launch, settings = cfg.launch, cfg.launch.kubernetes
    problems = []
    if not settings.get("image"):
        problems.append(Problem("launch.kubernetes", "has no image; write kubernetes: {image: registry/name:tag}"))
    if launch.processes_per_node is None:
        problems.append(Problem("launch.processes_per_node", "is needed to ask for as many GPUs; write a number"))
    if launch.endpoint is not None:
        problems.append(Problem("launch.endpoint", "is the first worker of the job; remove it"))
    if launch.rendezvous != "c10d":
        problems.append(Problem("launch.rendezvous", f"{launch.rendezvous} is not written for Kubernetes; write c10d"))
    if ("volume_claim" in settings) != ("mount_path" in settings):
        problems.append(Problem("launch.kubernetes", "volume_claim and mount_path belong together; write both"))
    if settings.get("kind") == "TrainJob" and launch.min_nodes != launch.max_nodes:
        problems.append(
            Problem("launch.nodes", "a TrainJob has a fixed number of nodes; write one number, or kind: PyTorchJob")
        )
    if settings.get("kind") == "TrainJob" and "working_dir" in settings:
        what = "working_dir cannot be set in a TrainJob; remove it and write absolute paths, or kind: PyTorchJob"
        problems.append(Problem("launch.kubernetes", what))
    if problems:
        raise ConfigError(problems)
    build = _train_job if settings.get("kind") == "TrainJob" else _pytorch_job
    return build(cfg, script, handed_over, settings.get("name") or _as_name(name))


def _as_name(text: str) -> str:
    """A name that Kubernetes takes: lower case letters, digits and hyphens."""
    word = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()).strip("-")
    return word[:50].rstrip("-") or "train"


def _metadata(cfg: Config, name: str) -> Native:
    space = cfg.launch.kubernetes.get("namespace")
    return {"name": name} | ({"namespace": space} if space else {})


def _env(cfg: Config, handed_over: Mapping[str, str]) -> list[Native]:
    return [{"name": name, "value": value} for name, value in {**handed_over, **environment_of(cfg)}.items()]


def _resources(cfg: Config) -> Native:
    return {"limits": {cfg.launch.kubernetes.get("gpu_resource", _GPU): cfg.launch.processes_per_node}}


def _volumes(cfg: Config) -> tuple[list[Native], list[Native]]:
    """Volumes and their mounts: NCCL and data loaders share memory beyond the 64 MiB that a container has."""
    settings = cfg.launch.kubernetes
    volumes: list[Native] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.get("shared_memory", "16Gi")}}
    ]
    mounts: list[Native] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if "volume_claim" in settings:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": settings["volume_claim"]}})
        mounts.append({"name": "work", "mountPath": settings["mount_path"]})
    return volumes, mounts


def _pytorch_job(cfg: Config, script: Script, handed_over: Mapping[str, str], name: str) -> Native:
    launch = cfg.launch
    command = command_of(cfg, script, {}, Host(f"{name}-worker-0:{_PORT}", name))
    volumes, mounts = _volumes(cfg)
    folder = launch.kubernetes.get("working_dir")
    container: Native = {
        "name": "pytorch",  # the operator looks for this name
        "image": launch.kubernetes["image"],
        "command": list(command.words),
        **({"workingDir": folder} if folder else {}),
        "env": _env(cfg, handed_over),
        "resources": _resources(cfg),
        "volumeMounts": mounts,
    }
    worker: Native = {
        "replicas": launch.max_nodes,
        "restartPolicy": "OnFailure" if launch.max_restarts else "Never",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
    elastic: Native = {"rdzvBackend": "c10d", "minReplicas": launch.min_nodes, "maxReplicas": launch.max_nodes}
    spec: Native = {
        "elasticPolicy": elastic | {"maxRestarts": launch.max_restarts},
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(cfg, name), "spec": spec}


def _train_job(cfg: Config, script: Script, handed_over: Mapping[str, str], name: str) -> Native:
    """The runtime `torch-distributed` tells torchrun the nodes, the processes and the address in variables PET_*."""
    launch = cfg.launch
    volumes, mounts = _volumes(cfg)
    restarts = ["--max-restarts", str(launch.max_restarts)] if launch.max_restarts else []
    container: Native = {"name": "node", "volumeMounts": mounts}
    trainer: Native = {
        "image": launch.kubernetes["image"],
        "command": ["torchrun", *restarts, *script.words()],
        "numNodes": launch.max_nodes,
        "numProcPerNode": launch.processes_per_node,
        "env": _env(cfg, handed_over),
        "resourcesPerNode": _resources(cfg),
    }
    pod: Any = {"spec": {"template": {"spec": {"containers": [container], "volumes": volumes}}}}
    patch: Native = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": pod}]}}}
    spec: Native = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "unishard", "trainingRuntimeSpec": patch}],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(cfg, name),
        "spec": spec,
    }


# -- The batch script of a Slurm job: one torchrun on each node, which meet at the first one. Pure but for `submit` --

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
    given = str(cfg.launch.slurm.get("signal", ""))
    word = given.rpartition(":")[2].partition("@")[0].upper().removeprefix("SIG")
    numbers = {str(each.value): each.name for each in Signals}
    name = numbers.get(word, f"SIG{word}")
    if not word or name in cfg.checkpoint.on_signal:
        return None
    return (
        f"launch.slurm: Slurm sends {name} before it ends the job (signal={given}), and ranks save only at signals in "
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
