"""`unishard doctor`: check whether this environment can train, and how to fix it if not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unishard.cli.tables import is_narrow, show, show_blocks
from unishard.cli.wrapping import echo, emit

if TYPE_CHECKING:
    from unishard.tools.doctor import Check

_COLUMNS = ("status", "what", "found", "to do")


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, max=64, metavar="N", help="Start N ranks on this host, and connect them."),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="DIR", help="Measure the disk of a directory for offload.nvme_path."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List also the probes of private names that have found what they need.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write it as JSON.")] = False,
) -> None:
    """Check this environment.

    Says first which engines can train here and what keeps the others from it, then what was checked: versions and
    whether they were tested, the engines, the private names that workarounds need (only those that fail, without
    --all), accelerators, and the launcher's variables. Imports the installed engines. Exits with 1 if training cannot
    run.

    Started by a launcher, as in `torchrun --nnodes 2 ... -m unishard doctor`, the ranks also connect, and rank 0
    reports the rendezvous, differences of versions, and an all-reduce over gloo and over NCCL.

    Example: unishard doctor --ranks 4
    """
    from unishard.tools.doctor import Status, connected, examine, place, worst

    topology = place()
    if topology.launcher == "python":
        checks = list(examine(ranks, disk))
    elif ranks is not None:
        raise typer.BadParameter(
            "a launcher has started this process among others; leave --ranks out", param_hint="--ranks"
        )
    else:
        connections = connected(topology)  # first: the ranks should not wait until one has imported the engines
        checks = [*(examine(directory=disk) if topology.rank == 0 else []), *connections]
        if not checks:
            return
    if as_json:
        emit(json.dumps(_object(checks), indent=2))
    else:
        _show(checks, every=every)
    if worst(checks) is Status.FAIL:
        raise typer.Exit(1)


def _show(checks: Sequence[Check], *, every: bool) -> None:
    from unishard.tools.doctor import Status, is_probe, summary

    for line in summary(checks):
        echo(line)
    echo()
    passed = [] if every else [check for check in checks if is_probe(check) and check.status is Status.OK]
    checks = [check for check in checks if check not in passed]
    if is_narrow(len(_COLUMNS), sys.stdout):
        blocks = [(check.name, [("", f"{check.status}: {check.found}"), ("to do", check.instead)]) for check in checks]
        show_blocks(((name, [line for line in lines if line[1]]) for name, lines in blocks), sys.stdout)
    else:
        show(_COLUMNS, [(check.status, check.name, check.found, check.instead) for check in checks], sys.stdout)
    hidden = f"; {len(passed)} probes passed, --all lists them" if passed else ""
    echo(", ".join(f"{count} {status}" for status, count in _counts(checks).items()) + hidden)


def _counts(checks: Sequence[Check]) -> dict[str, int]:
    from unishard.tools.doctor import Status

    return {str(status): sum(check.status is status for check in checks) for status in Status}


def _object(checks: Sequence[Check]) -> dict[str, Any]:
    from unishard.tools.doctor import summary, worst

    return {
        "status": str(worst(checks)),
        "verdict": list(summary(checks)),
        "counts": _counts(checks),
        "versions": {check.name: check.details["version"] for check in checks if "version" in check.details},
        "checks": [
            {
                "name": check.name,
                "status": str(check.status),
                "found": check.found,
                "instead": check.instead,
                **check.details,
            }
            for check in checks
        ],
    }
