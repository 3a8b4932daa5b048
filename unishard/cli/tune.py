"""`unishard tune`: find the fastest config for a script on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli import arguments as shared
from unishard.cli import script_runs
from unishard.cli.wrapping import echo, emit
from unishard.config import Config
from unishard.config.batch_sizes import check_batch
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.config.topology import Topology
    from unishard.tools.compare.trials import Trials
    from unishard.tools.compare.tuning import Tuned
    from unishard.tools.plan.devices import Device

Command = script_runs.ScriptLast


def tune(
    config: shared.ConfigFile,
    script: script_runs.OptionalScript = None,
    arguments: shared.ScriptArguments = None,
    module: shared.ScriptIsModule = False,
    model: script_runs.ModelName = None,
    seq_len: script_runs.SeqLen = 4096,
    device: shared.DeviceName = None,
    memory: shared.MemorySize = None,
    backends: script_runs.Backends = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies", metavar="A,B", help="Strategies. [default: all]", autocompletion=shared.strategy_lists
        ),
    ] = None,
    most: Annotated[int, typer.Option("--most", min=2, metavar="N", help="How many candidates to measure.")] = 8,
    steps: script_runs.Steps = 20,
    rounds: script_runs.Rounds = 1,
    processes_per_node: script_runs.Processes = None,
    set_: shared.Overrides = None,
    timeout: script_runs.Timeout = 600,
    out: script_runs.Out = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the best into the file, with the reasons as a comment.")
    ] = False,
    as_json: script_runs.AsJson = False,
) -> None:
    """Find the fastest config on this machine.

    Candidates are engines, strategies, activation checkpointing and micro-batch sizes; the samples of an update stay
    the same. With
    --model the plan drops those that do not fit into the device's memory, and the rest is measured on SCRIPT, or
    without one on random data. SCRIPT must load its config with unishard.load() and take its batch size from it.
    Options stand before SCRIPT.

    Example: unishard tune cfg.yaml --model ./llama --write train.py --epochs 1
    """
    from unishard.tools.compare.measuring import Task
    from unishard.tools.compare.tuning import expect_several, lines_of, tuned

    if write and set_:
        raise UnishardError(
            "--write edits the file, which --set does not; write the overrides into the file first: unishard set"
        )
    cfg, changes, origins = script_runs.given(config, set_, processes_per_node)
    what = script_runs.script_or_model(script, arguments, module, model, seq_len)
    ranks = script_runs.ranks_here(cfg)
    rest = f"; launch.nodes is {cfg.launch.nodes}, but only this host is measured" if cfg.launch.max_nodes > 1 else ""
    echo(f"note: for {ranks}{rest}", err=True)
    try:
        check_batch(cfg.training, ranks.topology.world_size * cfg.launch.max_nodes)
    except ConfigError as error:
        raise origins.locate(error) from None
    if cfg.training.global_batch_size is not None:  # of all hosts; the candidates take the same samples anyway
        changes = [*changes, "training.global_batch_size=null"]
        cfg = cfg.override(changes[-1])
    trials = _trials(cfg, ranks.topology, model, seq_len, backends, strategies, most, _device(device, memory))
    expect_several(trials)
    task = Task(config, what, steps, timeout, rounds=rounds)
    with script_runs.folder_of(out) as folder:
        found = tuned(cfg, list(script_runs.run_all(cfg, task, trials.kept, changes, folder)), trials.dropped)
    if as_json:
        emit(json.dumps(found.as_json(), indent=2))
    else:
        for line in lines_of(found):
            echo(line, laid_out=True)
    if found.best is None:  # the last lines of the output say why
        raise typer.Exit(1)
    if write:
        _write(config, found, ranks.topology.world_size, steps)
    elif found.changes:
        echo("write them into the file: the same command with --write", err=True)


def _trials(
    cfg: Config,
    topology: Topology,
    model: str | None,
    seq_len: int,
    backends: str | None,
    strategies: str | None,
    most: int,
    device: Device | None,
) -> Trials:
    from unishard.tools.compare.candidates import backends_of, strategies_of
    from unishard.tools.compare.trials import facts_of, trials_of, words_of
    from unishard.tools.plan.candidates import strategies_for
    from unishard.tools.plan.questions import RECOMPUTATIONS

    facts, known = None, list(RECOMPUTATIONS)
    if model is None:
        echo("without --model nothing is dropped for memory, and what does not fit fails", err=True)
        known = []  # which blocks can be recomputed is not known
    else:
        facts, note = facts_of(model, cfg, device, seq_len)
        if note:
            echo(f"activations are not known: {note}", err=True)
        if device is None:
            echo(
                "the memory of the device is not known, so nothing is dropped for it; give --device or --memory",
                err=True,
            )
        known = [word for word in RECOMPUTATIONS if word == "none" or facts.activations(word, 1) is not None]
    wanted = strategies_of(strategies) or strategies_for(cfg, topology)
    return trials_of(cfg, backends_of(cfg, backends), wanted, words_of(cfg, known), most, topology, facts)


def _device(name: str | None, memory: str | None) -> Device | None:
    """That of the options, or this machine's own."""
    if name is not None or memory is not None:
        return shared.device_of(name, memory)
    from unishard.tools.doctor.machine import own_device

    own = own_device()
    if own is None:
        return None
    found = shared.device_of("h100-80g", None)
    assert found is not None
    return found._replace(name=own[0], memory=own[1])


def _write(config: Path, found: Tuned, ranks: int, steps: int) -> None:
    """Write the changes and the reasons into the file."""
    from unishard.config.loading.document import text_of
    from unishard.config.loading.editing import check_text, edit
    from unishard.tools.compare.tuning import comment_of, with_comment

    text = with_comment(
        edit(config, found.changes) if found.changes else text_of(config), comment_of(found, ranks, steps)
    )
    check_text(text, str(config))
    shared.save(config, text)
    echo(f"{config}: wrote {', '.join(found.changes) or 'only the reasons: it is the fastest as it is'}", err=True)
