"""`unishard check`: find what `prepare` would refuse of a config, before a run is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from unishard.cli.arguments import ConfigFile, GpusPerNode, Overrides, Ranks, topology_of
from unishard.cli.checkpoint_formats import own_file
from unishard.cli.wrapping import echo, emit
from unishard.config.describe import count_of
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem

if TYPE_CHECKING:
    from unishard.doctor.config_check import CheckedRanks

__all__ = ["check"]


class _Passed(NamedTuple):
    backend: str
    ranks: CheckedRanks
    notes: list[str]


def check(
    config: ConfigFile,
    world_size: Ranks = None,
    gpus_per_node: GpusPerNode = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a config can train here.

    Finds everything that `prepare` would refuse before it sees the model: fields and values, batch sizes and groups for the number of
    ranks, what the backend does not support, packages that are not installed, and the directory of checkpoints. Exits with 1 if
    anything is refused.

    Example: unishard check cfg.yaml --world-size 64
    """
    topology = topology_of(world_size, gpus_per_node)
    try:
        with own_file(config):
            passed = _check(config, set_ or [], topology)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"path": each.path, "what": each.what, "where": each.where} for each in error.problems]
        emit(json.dumps({"file": str(config), "ok": False, "problems": problems, "notes": []}, indent=2))
        raise typer.Exit(1) from None
    if as_json:
        emit(json.dumps(_object(str(config), passed), indent=2))
        return
    echo(f"{config}: ok for {passed.backend} on {_in_words(passed.ranks)}")
    for note in passed.notes:
        echo(f"note: {note}", err=True)


def _check(config: ConfigFile, changes: list[str], topology: Topology | None) -> _Passed:
    """Check a config.

    Raises:
        ConfigError: It is refused. Lists every problem with `file:line`.
    """
    from unishard.doctor.config_check import CheckedRanks, notes_on, ranks_of, refusals_of
    from unishard.loading import read

    cfg, origins = read(config, changes)
    problems: list[Problem] = []
    checked = cfg
    try:
        ranks = CheckedRanks(topology, "--world-size") if topology else ranks_of(cfg)
    except ConfigError as error:  # no number of ranks fits, so the rest is checked without it
        problems += error.problems
        checked = cfg.override("training.global_batch_size=null")
        ranks = ranks_of(checked)
    problems += refusals_of(checked, ranks.topology)
    if problems:
        problems.sort(key=lambda problem: origins.of(problem.path).order)
        raise origins.locate(ConfigError(problems))
    return _Passed(cfg.backend, ranks, list(notes_on(cfg, ranks.topology)))


def _in_words(ranks: CheckedRanks) -> str:
    count = ranks.topology.world_size
    number = count_of(count, "rank")
    match ranks.origin:
        case "":
            return f"{number}; add --world-size N to check it for more"
        case "--world-size":
            return number
    return f"{number}, as {ranks.origin} says"


def _object(name: str, passed: _Passed) -> dict[str, Any]:
    count = passed.ranks.topology.world_size
    return {"file": name, "ok": True, "backend": passed.backend, "world_size": count, "problems": [], "notes": passed.notes}
