"""Reads DeepSpeed's hostfile: one line for each host, `NAME slots=N` (deepspeed 0.19.8, launcher/runner.py)."""

from __future__ import annotations

import re
from pathlib import Path

from unishard.config.loading.text_file import text_of
from unishard.errors import ConfigError, Problem

_LINE = re.compile(r"([^\s\x00-\x1f\x7f]+)\s+slots=(\d{1,9})")


def hosts_of(path: Path) -> dict[str, int]:
    """The hosts of a file in its order, with the slots that each has, which are the same for all.

    Raises:
        ConfigError: The file has other lines, no host, one host twice, or hosts with different numbers of slots.
    """
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or int(match[2]) == 0:
            problems.append(Problem("", f"{text!r:.100} is no host; write NAME slots=N", f"{path}:{number}"))
        elif match[1] in hosts:
            problems.append(Problem("", f"{match[1]} is listed twice; remove one line", f"{path}:{number}"))
        else:
            hosts[match[1]] = int(match[2])
    if not problems and not hosts:
        problems.append(Problem("", "names no host; write one line for each: NAME slots=N", str(path)))
    if not problems and len(set(hosts.values())) > 1:
        slots = ", ".join(f"{name} has {count}" for name, count in hosts.items())
        problems.append(
            Problem(
                "",
                f"hosts have different numbers of slots ({slots}); give each its own --processes-per-node",
                str(path),
            )
        )
    if problems:
        raise ConfigError(problems)
    return hosts
