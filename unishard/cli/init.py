"""`unishard init`: write a new config, with a comment above each field."""

from __future__ import annotations

import inspect
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unishard.cli.arguments import Overrides
from unishard.cli.output import save
from unishard.cli.wrapping import echo
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.config import Section

_PROPOSED = {"precision.compute": "bf16", "training.gradient_clipping": 1.0}
"""Where most people do not want the schema's default."""
_FIELDS = (
    "backend",
    "sharding.strategy",
    "precision.compute",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "training.gradient_clipping",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.weight_decay",
    "scheduler.name",
    "scheduler.warmup_steps",
    "offload.optimizer",
    "offload.params",
    "activation_checkpointing",
)
"""What a new file has, beside what `--set` sets."""
_WIDTH = 120


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")] = Path(
        "unishard.yaml"
    ),
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a new config.

    It has the fields that most runs decide, and those of --set, each below what it is. An existing config of any tool
    becomes one with `unishard translate`.

    Example: unishard init -o cfg.yaml --set backend=deepspeed
    """
    from unishard.config import Config, leaves, value_at
    from unishard.config.loading import read
    from unishard.config.nested import nested
    from unishard.config.unused import why_unused
    from unishard.contract.translate import translate

    if output.exists() and not force:
        raise UnishardError(f"{output}: exists; name another file with -o, or overwrite it with --force")
    cfg, origins = read(nested(_PROPOSED), set_ or ())
    try:
        translate(cfg).check(strict=cfg.strict)
    except ConfigError as error:
        raise origins.locate(error) from None
    chosen = {path for path, _ in leaves(Config) if origins.describe(cfg, path) == "override"}
    written = [path for path, _ in leaves(Config) if path in chosen or (path in _FIELDS and not why_unused(cfg, path))]
    save(output, "\n".join(_lines(Config, nested({path: value_at(cfg, path) for path in written}))).lstrip() + "\n")
    echo(f"{output}: written")
    echo(f"next: {shlex.join(['unishard', 'check', str(output)])}")


def _lines(section: type[Section], document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Each field below the first sentence of its description."""
    from unishard.config import Section
    from unishard.config.describe import choices
    from unishard.formats.unishard.format import value_text

    for name, field in section.model_fields.items():
        if name not in document:
            continue
        kind = field.annotation
        inner = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        if not indent:
            yield ""
        about = " ".join((inspect.getdoc(inner) or "" if inner else section.descriptions()[name]).split())
        sentence, start = f"{about.partition('. ')[0].rstrip('.')}.", f"{indent}# "
        words = [] if inner else choices(kind)
        if not all(word in sentence for word in words):
            sentence += f" One of {', '.join(words)}."
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent=start, subsequent_indent=start)
        if inner:
            yield f"{indent}{name}:"
            yield from _lines(inner, document[name], f"{indent}  ")
        else:
            yield f"{indent}{name}: {value_text(document[name])}"
