"""Writes the figures of docs/gpu.md from the JSON files of the pieces.

python -m benchmarks.gpu.page gpu-out docs/gpu.md
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.pieces import PIECES
from benchmarks.gpu.report import read
from dev.pages import marked
from dev.pages.markdown import table

NOT_RUN = "Not run on a GPU yet: no figure from a GPU has been measured."
_NOT_RUN = ("not run", "", "", "")


def figures(reports: Sequence[dict[str, Any]]) -> str:
    """The section's text. What ran on a CPU is no figure of a GPU, so without any from CUDA it says that there is
    none.
    """
    ran = {report["piece"]: report for report in reports if report["device"] == "cuda" and report["hardware"]}
    if not ran:
        return NOT_RUN
    head = ("piece", "verdict", "checks", "losses apart", "seconds")
    rows = ((piece.name, *(row(ran[piece.name]) if piece.name in ran else _NOT_RUN)) for piece in PIECES)
    blocks = ["\n".join(hardware(list(ran.values()))), table(head, rows), *speeds(ran), *stated(ran)]
    return "\n\n".join(blocks)


def hardware(reports: list[dict[str, Any]]) -> list[str]:
    """Each card with its versions, once."""
    found = {
        f"{report['hardware']}; " + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        for report in reports
    }
    return sorted(found)


def row(report: dict[str, Any]) -> tuple[str, ...]:
    counted = Counter(check["verdict"] for check in report["checks"])
    checks = ", ".join(f"{number} {verdict}" for verdict, number in counted.items())
    return report["verdict"], checks, apart(report["checks"]), f"{report['seconds']:g}"


def apart(checks: list[dict[str, Any]]) -> str:
    """The largest distance of losses from what they are compared with, by precision where the checks name one."""
    found: dict[str, float] = {}
    for check in checks:
        if "losses" in check["figures"]:
            precision = next((word for word in ("fp32", "bf16", "fp16") if word in check["name"]), "")
            found[precision] = max(found.get(precision, 0.0), check["figures"]["losses"])
    return ", ".join(f"{precision} {far:.0e}".strip() for precision, far in found.items())


def speeds(ran: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A table of the throughput pieces; nothing where they have no figures."""
    rows = [
        (check["name"].partition(":")[0], who, *_speed(check["figures"], who))
        for report in ran.values()
        for check in report["checks"]
        for who in (("unishard", "by hand") if "ratio" in check["figures"] else ())
    ]
    if rows:
        yield table(("engine, model", "loop", "tokens/s", "MFU", "peak memory, GiB", "ratio"), rows)


def _speed(found: dict[str, Any], who: str) -> tuple[str, ...]:
    side = found[who]
    used = "" if side["mfu"] is None else f"{side['mfu']:.1%}"
    ratio = f"{found['ratio']:.3f}" if who == "unishard" else ""
    return f"{side['tokens_per_second']:,.0f}", used, f"{side['peak_gib']:.1f}", ratio


def stated(ran: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What failed or is not supported, each with the first line of why."""
    lines = [
        f"- {report['piece']}, {check['verdict']}: {check['name']}: {check['detail'].partition(chr(10))[0]}"
        for report in ran.values()
        for check in report["checks"]
        if check["verdict"] in ("fail", "unsupported")
    ]
    if lines:
        yield "\n".join(lines)


def write(folder: Path, page: Path) -> None:
    """Write the figures into a page."""
    marked.write(page, "figures", figures(read(folder)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the JSON files")
    parser.add_argument("page", type=Path)
    given = parser.parse_args(arguments)
    write(given.folder, given.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
