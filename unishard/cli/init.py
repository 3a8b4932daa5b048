"""`unishard init`: ask for the values of a config and write it with comments."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.arguments import Overrides
from unishard.cli.output import save
from unishard.cli.wrapping import echo, width_of, wrapped
from unishard.config.describe import shown
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.formats.wizard import Draft, Question


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")] = Path(
        "unishard.yaml"
    ),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; accept all proposed values.")] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="OLD", help="Start from a config of any tool.")
    ] = None,
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a new config, question by question.

    Each field gets a comment. With --from, an existing config of any tool supplies values.

    Example: unishard init -o cfg.yaml --set backend=deepspeed
    """
    if output.exists() and not force:
        raise UnishardError(f"{output}: exists; name another file with -o, or overwrite it with --force")
    if not yes and not sys.stdin.isatty():
        raise UnishardError(
            "cannot ask questions without a terminal; add --yes to accept the proposed values, and --set for others"
        )
    from unishard.formats.wizard import Draft

    draft = _started(from_, [change for change in set_ or () if change.startswith("backend=")]) if from_ else Draft()
    if set_:
        draft.answer(set_)
    chosen = {change.partition("=")[0].strip() for change in set_ or ()}
    for question in draft.questions:
        if question.path in chosen:
            continue
        if not yes:
            _ask(draft, question)
        elif question.path not in draft.undecided:
            _take(draft, question)
    draft.check()
    save(output, draft.text)
    for path, who in draft.undecided.items():
        echo(f"needs input: {path} comes from {who}", err=True)
    echo(f"{output}: written")
    open_fields = (word for path in draft.undecided for word in ("--set", f"{path}=VALUE"))
    echo(f"next: {shlex.join(['unishard', 'check', str(output), *open_fields])}")


def _started(old: Path, changes: list[str]) -> Draft:
    """Make a draft from an existing config; report what cannot be used."""
    from unishard import formats
    from unishard.formats.wizard import Draft

    reading = formats.translate(old, "unishard", overrides=changes).reading
    for entry in reading.entries:
        if entry.effect.fit == "unsupported":
            echo(f"not used: {reading.source.name}: {entry.key}: {entry.effect.note}", err=True)
    return Draft.of(reading)


def _take(draft: Draft, question: Question) -> None:
    if question.path in draft.left:
        echo(f"not in the existing config: {question.path}; using {shown(draft.proposal(question.path))}", err=True)
    draft.answer([_change(draft, question)])


def _change(draft: Draft, question: Question) -> str:
    from unishard.formats.unishard.format import value_text

    return f"{question.path}={value_text(draft.proposal(question.path))}"


def _ask(draft: Draft, question: Question) -> None:
    """Ask until the answer is valid."""
    from unishard.formats.wizard import offered

    words = offered(question.path)
    text = question.text + (f" ({', '.join(words)})" if words else "")
    if who := draft.undecided.get(question.path):
        text += f" [in the existing config, it comes from {who}]"
    default = _change(draft, question).partition("=")[2]
    while True:
        reply = typer.prompt(
            wrapped(f"{text} [{default}]", width_of(sys.stdout) - len(": "), hanging="    "),
            default=default,
            show_default=False,
        )
        try:
            draft.answer([f"{question.path}={reply}"])
            return
        except ConfigError as error:
            echo(error, err=True)
