"""Runs a spanning part of the suite on each version set; writes docs/versions/*.json as results come, and
docs/versions.md.

make versions                                       # every set: hours, mostly downloads
make versions ONLY=torch-2.11                       # one set, or several with commas between
make versions ONLY=torch-2.11 ARGS="--venv DIR"     # in an environment that is there already
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dev.versions.environments import NotInstallable, environment
from dev.versions.page import judged, write
from dev.versions.running_pieces import run_piece
from dev.versions.sets import ROOT, SETS, VersionSet

__all__ = ["main", "measure", "misfits"]


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="make versions")
    parser.add_argument("--only", default="", help="names of version sets, with commas between")
    parser.add_argument(
        "--venv", type=Path, help="an environment to use instead of building one; needs one set in --only"
    )
    parser.add_argument("--keep", action="store_true", help="leave new environments where they are")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder of versions.md and versions/")
    given = parser.parse_args(arguments)
    chosen = _chosen(given.only, parser)
    if given.venv and len(chosen) != 1:
        parser.error("--venv is one environment; name its version set with --only")
    results = [_row(each, given.venv, given.keep, given.out) for each in chosen]
    return int(any(result["wrong"] for result in results))


def _chosen(only: str, parser: argparse.ArgumentParser) -> list[VersionSet]:
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {each.name for each in SETS}:
        parser.error(f"no version set {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in SETS)}")
    return [each for each in SETS if not names or each.name in names]


def _row(version_set: VersionSet, venv: Path | None, keep: bool, out: Path) -> dict[str, Any]:
    """Measure one set; what is known is on the page before the next set begins."""
    _say(f"{version_set.name}:")
    result = measure(version_set, venv, keep)
    path = out / "versions" / f"{version_set.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write(out)
    _say(f"{version_set.name}: {result['wrong'] or 'right'}")
    return result


def measure(version_set: VersionSet, venv: Path | None = None, keep: bool = False) -> dict[str, Any]:
    """Everything that is known of one version set, one that cannot be installed too."""
    facts: dict[str, Any] = {
        "name": version_set.name,
        "date": datetime.now().date().isoformat(),
        "asked": [f"python {version_set.python}", *version_set.pins],
        "versions": {},
        "pieces": {},
        "wrong": "",
    }
    start = time.monotonic()
    try:
        with environment(version_set, venv, keep) as python:
            _say(f"  {python}, after {time.monotonic() - start:.0f} s")
            for name in version_set.pieces:
                facts["pieces"][name] = done = run_piece(name, python)
                _say(f"  {name}: {done['seconds']} s{': ' + done['wrong'] if done['wrong'] else ''}")
                if name == "doctor" and done["found"]:
                    facts["versions"] = done["found"].pop("versions")
                    if misfit := misfits(version_set, facts["versions"]):
                        raise NotInstallable(misfit)
    except NotInstallable as error:
        return facts | {"wrong": f"not installable: {error}"}
    return facts | {"wrong": "; ".join(_wrong(facts["pieces"]))}


def _wrong(pieces: dict[str, dict[str, Any]]) -> list[str]:
    """The pieces in which something is wrong, and how much of each."""
    lines = []
    for name, piece in pieces.items():
        wrong = [bool(facts["wrong"]) for _, facts in judged(piece["found"])]
        if piece["wrong"]:
            lines.append(f"{name}: {piece['wrong']}")
        elif any(wrong):
            lines.append(f"{name}: {sum(wrong)} of {len(wrong)} wrong")
    return lines


def misfits(version_set: VersionSet, versions: dict[str, str | None]) -> str:
    """What is installed in other versions than the set asks for; empty for nothing."""
    asked = [("python", f"{version_set.python}.*"), *(tuple(pin.split("==")) for pin in version_set.pins)]
    said = {name: (versions.get(name) or "nothing").partition("+")[0] for name, _ in asked}
    odd = [
        f"{name} {wanted} is asked for, {said[name]} is installed"
        for name, wanted in asked
        if not _fits(said[name], wanted)
    ]
    return "; ".join(odd)


def _fits(version: str, wanted: str) -> bool:
    return any(
        fnmatch(each, wanted)
        for each in (version, f"{version}.0", version.removesuffix(".0"), version.removesuffix(".0.0"))
    )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
