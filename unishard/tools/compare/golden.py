"""Golden files: what a run has given at each step, and the config that decided it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.nested import flat
from unishard.errors import ConfigError, Problem
from unishard.tools.compare import records as logged
from unishard.tools.compare.modules import module_lines

_AROUND = ("launch", "logging", "profile", "checkpoint", "backend", "sharding", "communication", "strict")
"""Sections that do not change what is trained."""
_LARGEST_FILE = 2**28
"""Bytes of a golden file; a line has about 300."""


class ComparedRun(NamedTuple):
    """One side of a comparison."""

    name: str
    course: logged.Course
    facts: Mapping[str, Any]
    """The fields of the config that decide what is trained; empty where they are not known."""


def facts_of(cfg: Config) -> dict[str, Any]:
    """The fields that decide what is trained, by their paths."""
    dumped = cfg.model_dump(mode="json")
    return dict(flat({name: section for name, section in dumped.items() if name not in _AROUND}))


def golden_text(records: Sequence[logged.Record], cfg: Config, modules: str = "") -> str:
    """A golden file: a line with the config, then one for each step, then those of its modules.

    Args:
        records: The steps.
        cfg: The config.
        modules: The text of `modules.jsonl`, if modules were measured.
    """
    course = logged.Course.of(records)
    lines: list[dict[str, Any]] = [{"unishard_golden": 1, "config": facts_of(cfg)}]
    rows = zip(course.steps, course.losses, course.norms, course.lrs, course.samples, strict=True)
    lines += [
        {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "samples": samples}
        for step, loss, norm, lr, samples in rows
    ]
    return "".join(json.dumps(line) + "\n" for line in lines) + module_lines(modules)


def read_golden(path: Path) -> ComparedRun:
    """Read a golden file, or a `log.jsonl` of a run.

    Raises:
        ConfigError: It has no losses.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(
            [Problem("", f"cannot be opened ({error.strerror}); name a golden file, or a log.jsonl", str(path))]
        ) from None
    if size > _LARGEST_FILE or not path.is_file():
        raise ConfigError(
            [Problem("", f"is no file of at most {_LARGEST_FILE} bytes; name a golden file, or a log.jsonl", str(path))]
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    records = logged.records_in(text)
    if not records:
        problem = (
            'has no losses; write it with --write-golden, or name a log.jsonl: lines such as {"step": 1, "loss": 2.5}'
        )
        raise ConfigError([Problem("", problem, str(path))])
    return ComparedRun(path.name, logged.Course.of(records), _config_in(text))


def _config_in(text: str) -> dict[str, Any]:
    try:
        first = json.loads(text.splitlines()[0])
    except (ValueError, RecursionError):
        return {}
    config = first.get("config") if isinstance(first, dict) else None
    return config if isinstance(config, dict) else {}
