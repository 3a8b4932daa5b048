"""`unishard translate DIR`: find a project's configs and check how each would translate."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from unishard.cli.wrapping import echo, emit, report_width, shell_lines, wrapped
from unishard.config.describe import count_of
from unishard.contract.rules import Fit
from unishard.errors import in_one_line

if TYPE_CHECKING:
    from unishard.formats.advice.surveying import ForeignConfig, FoundConfig, SkippedFile, UnreadableConfig

_REFUSED = 1
_ENGINE_OPEN = "does not say its engine, which its launcher chooses"
_OUTCOMES = {0: "translates", _REFUSED: "refused", 2: "approximate"}


def look(folder: Path, to: str, *, as_json: bool) -> None:
    """Show what each config below a folder is, how it would translate, and the command that does it. Writes nothing.

    Raises:
        ConfigError: There is no such format.
    """
    from unishard.formats import catalog
    from unishard.formats.advice.surveying import ForeignConfig, FoundConfig, SkippedFile, UnreadableConfig, survey

    catalog.target(to)
    seen = list(survey(folder, to))
    configs = [one for one in seen if isinstance(one, FoundConfig)]
    others = [one for one in seen if isinstance(one, ForeignConfig)]
    broken = [one for one in seen if isinstance(one, UnreadableConfig)]
    skipped = [one for one in seen if isinstance(one, SkippedFile)]
    if as_json:
        whole = {
            "configs": list(map(_object, configs)),
            "other_tools": [{"path": one.path, "tool": one.tool, "instead": one.instead} for one in others],
        }
        left = {"unreadable": list(map(_why, broken)), "skipped": list(map(_why, skipped))}
        emit(json.dumps({"to": to, "counts": _counts(configs, others, broken, skipped), **whole, **left}, indent=2))
        return
    for path, lines in sorted(_blocks(configs, others, to, catalog.get(to).suffix)):
        _say(path)
        for line in lines:
            echo(line, laid_out=True)
    for one in broken:
        _say(f"cannot be read: {one.path}: {one.why}")
    if any(one.open_fields for one in configs):
        _say(
            "needs input: add --with and the command that trains in quotes, Accelerate's or DeepSpeed's config or "
            "TrainingArguments, or --set FIELD=VALUE"
        )
    _say(_in_words(_counts(configs, others, broken, skipped), to))


def _say(text: str) -> None:
    echo(_fitted(text), laid_out=True)


def _fitted(text: str) -> str:
    return wrapped(in_one_line(text), report_width(sys.stdout), hanging="      ")


def _counts(
    configs: list[FoundConfig], others: list[ForeignConfig], broken: list[UnreadableConfig], skipped: list[SkippedFile]
) -> dict[str, int]:
    """How many files there are, and how many of them are what; the others add up to the first."""
    outcomes = Counter(_OUTCOMES[one.status] for one in configs)
    whole = {"files": len(configs) + len(others) + len(broken) + len(skipped)}
    left = {"other_tools": len(others), "unreadable": len(broken), "skipped": len(skipped)}
    return whole | {word: outcomes[word] for word in _OUTCOMES.values()} | left


def _in_words(counts: dict[str, int], to: str) -> str:
    """`9 files: 1 translates to unishard, 1 refused, 1 cannot be read, 6 are not configs`."""
    files, translates, skipped = counts["files"], counts["translates"], counts["skipped"]
    parts = [
        f"{translates} translate{'s' if translates == 1 else ''} to {to}",
        f"{counts['refused']} refused",
        *([f"{counts['approximate']} only approximate, and strict is on"] if counts["approximate"] else []),
        *([f"{counts['other_tools']} of other tools"] if counts["other_tools"] else []),
        f"{counts['unreadable']} cannot be read",
        f"{skipped} skipped (no configs, or above 1 MiB)",
    ]
    return f"{count_of(files, 'file')}: {', '.join(parts)}"


def _blocks(
    configs: list[FoundConfig], others: list[ForeignConfig], to: str, suffix: str
) -> Iterator[tuple[str, list[str]]]:
    """The path of each file, and what is known about it, the command to paste last."""
    for other in others:
        tool = f"{'an' if other.tool[0] in 'AEIOUaeiou' else 'a'} {other.tool} config"
        yield other.path, [_fitted(f"  not read: {tool}; {other.instead}")]
    for one in configs:
        counts = ", ".join(f"{count} {fit}" for fit, count in one.counts.items() if count)
        where = f" ({one.block})" if one.block else ""
        summary = f"  {one.format}{where}: engine {one.backend}, strategy {one.strategy}, precision {one.precision}"
        yield (
            one.path,
            [
                _fitted(summary),
                _fitted(f"  {_OUTCOMES[one.status]}: {_ENGINE_OPEN if one.engine_open else counts}"),
                *([_command(one, to, suffix)] if one.format != to or one.block else []),
            ],
        )


def _command(one: FoundConfig, to: str, suffix: str) -> str:
    """What to type for a file; a refused one is translated without the keys that have no equivalent."""
    options = ["--from", one.format] if one.block else []
    options += ["--with", "COMMAND"] if one.engine_open else []
    options += ["--drop-unsupported"] if one.status == _REFUSED and one.counts[Fit.UNSUPPORTED] else []
    new = str(Path(one.path).with_suffix(f".{to}{suffix}"))
    words = ("unishard", "translate", one.path, "--to", to, *options, "-o", new)
    return shell_lines(map(shlex.quote, words), report_width(sys.stdout), indent="    ")


def _object(one: FoundConfig) -> dict[str, object]:
    return {
        "path": one.path,
        "format": one.format,
        "backend": one.backend,
        "strategy": one.strategy,
        "precision": one.precision,
        "keys": {str(fit): one.counts[fit] for fit in Fit},
        "status": one.status,
        "needs_input": list(one.open_fields),
        "engine_open": one.engine_open,
        "block": one.block or None,
    }


def _why(one: UnreadableConfig | SkippedFile) -> dict[str, str]:
    return {"path": one.path, "why": one.why}
