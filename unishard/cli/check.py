"""`unishard check`: find what `prepare` would refuse of a config, before a run is started."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

import typer

from unishard.cli.arguments import ConfigFile, Overrides, Ranks, RanksPerNode, topology_of
from unishard.cli.foreign_file import own_file
from unishard.cli.wrapping import echo, emit
from unishard.config.run_ranks import RunRanks, ranks_of
from unishard.errors import ConfigError, Problem


class _Passed(NamedTuple):
    backend: str
    ranks: RunRanks
    notes: list[str]


def check(
    config: ConfigFile,
    world_size: Ranks = None,
    gpus_per_node: RanksPerNode = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a config can train here.

    Finds everything that `prepare` would refuse before it sees the model: fields and values, batch sizes and groups for
    the number of ranks, what the backend does not support, packages that are not installed, and the directory of
    checkpoints. Exits with 1 if anything is refused.

    Example: unishard check cfg.yaml --world-size 64
    """
    topology_of(world_size, gpus_per_node)  # refuses what does not divide
    try:
        with own_file(config):
            passed = _check(config, set_ or [], world_size, gpus_per_node)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"path": problem.path, "what": problem.what, "where": problem.where} for problem in error.problems]
        emit(json.dumps({"file": str(config), "ok": False, "problems": problems, "notes": []}, indent=2))
        raise typer.Exit(1) from None
    if as_json:
        emit(json.dumps(_object(str(config), passed), indent=2))
        return
    more = "" if passed.ranks.origin else "; add --world-size N to check it for more"
    echo(f"{config}: ok for {passed.backend} on {passed.ranks}{more}")
    for note in passed.notes:
        echo(f"note: {note}", err=True)


def _check(config: ConfigFile, changes: list[str], world_size: int | None, per_node: int | None) -> _Passed:
    """Check a config.

    Raises:
        ConfigError: It is refused. Lists every problem with `file:line`.
    """
    from unishard.config.loading import read
    from unishard.tools.doctor.config_check import notes_on, refusals_of

    cfg, origins = read(config, changes)
    problems: list[Problem] = []
    checked = cfg
    try:
        ranks = ranks_of(cfg, world_size, per_node)
    except ConfigError as error:  # no number of ranks fits, so the rest is checked without it
        problems += error.problems
        checked = cfg.override("training.global_batch_size=null")
        ranks = ranks_of(checked)
    problems += refusals_of(checked, ranks.topology)
    if problems:
        problems.sort(key=lambda problem: origins.of(problem.path).order)
        raise origins.locate(ConfigError(problems))
    return _Passed(cfg.backend, ranks, list(notes_on(cfg, ranks.topology)))


def _object(name: str, passed: _Passed) -> dict[str, Any]:
    count = passed.ranks.topology.world_size
    return {
        "file": name,
        "ok": True,
        "backend": passed.backend,
        "world_size": count,
        "problems": [],
        "notes": passed.notes,
    }
