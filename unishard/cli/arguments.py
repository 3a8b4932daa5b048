"""Arguments that several commands share."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.wrapping import echo
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem, UnishardError

if TYPE_CHECKING:
    from unishard.config import Config
    from unishard.config.batch_sizes import RunRanks
    from unishard.tools.plan.devices import Device


# -- What the shell offers for backends, formats and `FIELD=VALUE` ---------------------------------
# The completion itself is typer's: `--install-completion`.


def installed_backends() -> list[str]:
    """The installed backends; none if two packages offer the same name, which a command that needs one reports."""
    from unishard.contract import registry
    from unishard.errors import BackendError

    try:
        return list(registry.available())
    except BackendError:
        return []


def backends(ctx: typer.Context, incomplete: str) -> list[str]:
    """The installed backends; after `--set FIELD=` in bash, the field's values."""
    path = _cut_off(ctx)
    return [word for word in (_words(path) if path else installed_backends()) if word.startswith(incomplete.lower())]


def backend_lists(incomplete: str) -> list[str]:
    """The installed backends, after those already in a list with commas."""
    return _after_commas(installed_backends(), incomplete)


def strategy_lists(incomplete: str) -> list[str]:
    """The strategies, after those already in a list with commas."""
    return _after_commas(_words("sharding.strategy"), incomplete)


def _after_commas(words: list[str], incomplete: str) -> list[str]:
    before, comma, start = incomplete.rpartition(",")
    used = before.split(",")
    return [f"{before}{comma}{word}" for word in words if word.startswith(start) and word not in used]


def devices(incomplete: str) -> list[str]:
    """The devices of `--device`."""
    from unishard.tools.plan.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """The formats of `--from`."""
    from unishard.formats.catalog import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def written_formats(incomplete: str) -> list[str]:
    """The formats of `--to`."""
    from unishard.formats.catalog import written

    return [name for name in written() if name.startswith(incomplete)]


def changes(ctx: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """Fields that begin like this, with a `=`; of a single field, its values."""
    from unishard.config import Config, leaves

    if path := _cut_off(ctx):
        return [word for word in _words(path) if word.startswith(incomplete)]
    path, equals, start = incomplete.partition("=")
    known = dict(leaves(Config))
    fields = [field for field in known if (field == path if equals else field.startswith(path))]
    if len(fields) != 1:
        return [(f"{field}=", _first_sentence(field)) for field in fields]
    (field,) = fields
    return [f"{field}={word}" for word in _words(field) if word.startswith(start)] or ([] if equals else [f"{field}="])


def _cut_off(ctx: typer.Context) -> str | None:
    """The field whose value is being typed, where the shell cuts words at `=`, as bash does: it hands over `FIELD`,
    then the value.
    """
    from unishard.config import Config, leaves

    typed = [str(change) for change in ctx.params.get("set_") or () if change != "="]
    return typed[-1] if typed and typed[-1] in dict(leaves(Config)) else None


def _words(path: str) -> list[str]:
    """The values that a field offers: its choices, or else its default."""
    from unishard.config import Config, leaves, value_at
    from unishard.config.describe import bare, choices

    if path == "backend":
        return installed_backends()
    kind = dict(leaves(Config))[path].annotation
    default = value_at(Config(), path)
    if isinstance(default, bool):
        return ["true", "false"]
    text = bare(default)
    return choices(kind) or ([text] if text.isprintable() and not set(text) & set(" []{}") else [])


def _first_sentence(path: str) -> str:
    from unishard.config import Config

    section, _, name = path.rpartition(".")
    owner = Config.model_fields[section].annotation if section else Config
    text = owner.descriptions()[name]  # type: ignore[union-attr]  # a section
    return shorten(text.partition(". ")[0].partition(": ")[0].replace("`", ""), 70, placeholder=" ...").rstrip(".")


ConfigFile = Annotated[Path, typer.Argument(metavar="CFG", help="A unishard config (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field, such as training.seed=1. Repeatable.",
        autocompletion=changes,
    ),
]
ScriptName = Annotated[str, typer.Argument(metavar="SCRIPT", help="What each rank runs.")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Of the script.")]
ScriptIsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", min=1, metavar="N", help="Number of ranks. [default: from the file]"),
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, metavar="M", help="Ranks per node. [default: all]")]
RanksPerNode = Annotated[
    int | None,
    typer.Option("--gpus-per-node", min=1, metavar="M", help="Ranks per node. [default: from the file]"),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="What a rank computes on, such as h100-80g.", autocompletion=devices),
]
MemorySize = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory of a rank's device, such as 80GiB."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Output file. [default: stdout]"),
]


def topology_of(ranks: int | None, per_node: int | None) -> Topology | None:
    """The topology given on the command line; None if there is none.

    Raises:
        typer.BadParameter: The ranks do not fill the nodes equally.
    """
    if ranks is None and per_node is None:
        return None
    ranks = ranks or per_node or 1
    per_node = per_node or ranks
    if ranks % per_node:
        raise typer.BadParameter(
            f"{ranks} ranks do not divide into nodes of {per_node}; give a --world-size that is a multiple of "
            f"{per_node}"
        )
    return Topology(ranks, per_node)


def run_ranks(cfg: Config, ranks: int | None, per_node: int | None) -> RunRanks:
    """The ranks of the command line, or else of the config.

    Raises:
        typer.BadParameter: The ranks do not fill the nodes equally.
        ConfigError: No number of ranks gives the global batch size.
    """
    from unishard.config.batch_sizes import ranks_of

    topology_of(ranks, per_node)  # refuses what does not divide
    return ranks_of(cfg, ranks, per_node)


def note_ranks(ranks: RunRanks) -> None:
    """Say on stderr for how many ranks the output is, unless an option has said it."""
    if not ranks.given:
        echo(f"note: for {ranks}" + ("" if ranks.origin else "; add --world-size N for more"), err=True)


def device_of(name: str | None, memory: str | None) -> Device | None:
    """The device of the options; the bandwidths of an H100 where only a memory is given.

    Raises:
        ConfigError: One cannot be read.
    """
    from unishard.tools.plan.devices import device_named, parse_bytes

    if name is None and memory is None:
        return None
    found = device_named(name or "h100-80g")
    return found if memory is None else found._replace(name=name or memory, memory=parse_bytes(memory))


# -- The error when a command for unishard files gets another tool's config ------------------------


@contextmanager
def own_file(path: Path) -> Iterator[None]:
    """Replace the errors of another tool's config by one that names the tool.

    Raises:
        ConfigError: As inside, or because the file is another tool's.
    """
    try:
        yield
    except ConfigError as error:
        tool = _tool_of(path)
        if tool is None:
            raise
        advice = f"translate it first: unishard translate {path} --to unishard -o cfg.yaml"
        raise ConfigError(
            [Problem("", f"is a config of {tool}, but this command needs a unishard config; {advice}", str(path))]
        ) from error


def _tool_of(path: Path) -> str | None:
    """The format of another tool's file, if our schema lacks at least half of its keys; None otherwise."""
    from unishard.config import Config
    from unishard.formats import catalog
    from unishard.formats.source import open_source

    try:
        source = open_source(path)
        name = catalog.recognise(source).name
    except ConfigError:
        return None
    strange = [key for key in source.data if key not in Config.model_fields]
    return name if name != "unishard" and 2 * len(strange) >= len(source.data) else None


# -- Write a command's output file atomically ------------------------------------------------------


def save(path: Path, text: str) -> None:
    """Write a file atomically; a pipe or a device is written directly.

    Raises:
        UnishardError: The file cannot be written.
    """
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG | 0o666 & ~_umask()
        if stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), text, stat.S_IMODE(mode))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnishardError(
            f"{path}: cannot be written ({error.strerror}); name a file in an existing, writable directory"
        ) from None


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace or create a file atomically."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(draft).chmod(mode)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
