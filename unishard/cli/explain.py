"""`unishard explain`: show what a file says, where, and what it becomes on every installed backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli import completion
from unishard.cli.arguments import ConfigFile, Overrides, Ranks, RanksPerNode, note_ranks, run_ranks
from unishard.cli.foreign_file import own_file
from unishard.cli.tables import fitting, is_narrow, show, show_blocks
from unishard.cli.wrapping import echo, emit
from unishard.config.describe import bare, count_of
from unishard.errors import ConfigError

if TYPE_CHECKING:
    from unishard.config import Config
    from unishard.config.loading import Origins
    from unishard.config.topology import Topology
    from unishard.contract.explain import ExplainedField, Image

_COLUMNS = ("field", "value", "from")


def explain(
    config: ConfigFile,
    backend: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(completion.installed_backends()) or "BACKEND",
            help="Show only this backend.",
            autocompletion=completion.backends,
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Print the engine's own config, without what the model adds unless --model names it. [default "
            "backend: CFG's]",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A local folder with config.json, or module:factory: shows also what the optimizer does with its "
            "parameters; with --native what the model adds.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show also the defaults that nothing changes.")] = False,
    set_: Overrides = None,
    world_size: Ranks = None,
    gpus_per_node: RanksPerNode = None,
) -> None:
    """Show what a config says and what follows.

    For each field that CFG or --set sets, and each default that these give another meaning: its value, its origin, and
    what it becomes on each installed backend. A field that is off says so. A table where the terminal has room, else a
    block for each field. With --model, also which parameters the optimizer updates, how, and which are frozen.

    Example: unishard explain cfg.yaml deepspeed
    """
    from unishard.config.loading import read

    if native and every:
        raise typer.BadParameter("--native prints the whole native config; leave out --all")

    backend = backend and backend.lower()
    with own_file(config):
        cfg, origins = read(config, set_ or ())
    left = 0
    try:
        ranks = run_ranks(cfg, world_size, gpus_per_node)
        if native:
            _print_native(cfg, backend, model, ranks.topology)
        else:
            left = _show(cfg, origins, backend, ranks.topology, every=every)
            if model is not None:
                _show_updates(cfg, model)
    except ConfigError as error:
        raise origins.locate(error) from None
    if left:
        echo(f"note: --all shows {count_of(left, 'field')} more, at their defaults", err=True)
    note_ranks(ranks)


def _print_native(cfg: Config, backend: str | None, model: str | None, topology: Topology) -> None:
    from unishard.contract.translate import translate
    from unishard.tools.plan.model import PlannedModel

    if model is not None:
        native = PlannedModel(model, cfg).native(backend or cfg.backend, topology)
    else:
        native = translate(cfg, backend=backend, topology=topology).check(strict=cfg.strict).native
    emit(json.dumps(native, indent=2, allow_nan=False))


def _show(cfg: Config, origins: Origins, backend: str | None, topology: Topology, *, every: bool) -> int:
    """Write the fields that the config decides, or all; how many are left out."""
    from unishard.contract import registry
    from unishard.contract.explain import explain as rows_of

    rows = rows_of(cfg, origins, topology)
    names = [registry.get(backend).name] if backend else sorted({name for row in rows for name in row.images})
    rows = [row for row in rows if any(name in row.images for name in names)]
    told = rows if every else [row for row in rows if row.is_set or not row.follows.isdisjoint(names)]
    _write(told, names)
    return len(rows) - len(told)


def _write(rows: Sequence[ExplainedField], names: Sequence[str]) -> None:
    cells = [
        (row.path, bare(row.value), row.origin, *(_becomes(row.images.get(name)) for name in names)) for row in rows
    ]
    columns = (*_COLUMNS, *names)
    if is_narrow(len(columns), sys.stdout) or fitting([columns, *cells], sys.stdout) is None:
        show_blocks(
            ((f"{row.path} = {bare(row.value)}  ({row.origin})", list(_lines(row, names))) for row in rows), sys.stdout
        )
    else:
        show(columns, cells, sys.stdout)
        _show_notes(rows, names)


def _show_updates(cfg: Config, model: str) -> None:
    from unishard.tools.plan.model import PlannedModel
    from unishard.tools.plan.updates import updates_of

    sys.stdout.write("\n")
    cells = [
        (
            each.names,
            " x ".join(map(str, each.shape)) or "scalar",
            str(each.number),
            each.by,
            "" if each.lr is None else bare(each.lr),
            "" if each.weight_decay is None else bare(each.weight_decay),
        )
        for each in updates_of(cfg, PlannedModel(model, cfg).shape)
    ]
    show(("parameters", "shape", "number", "updated by", "lr", "weight decay"), cells, sys.stdout)


def _show_notes(rows: Sequence[ExplainedField], names: Sequence[str]) -> None:
    notes = [
        (name, row.path, image.fit, image.note)
        for name in names
        for row in rows
        if (image := row.images.get(name)) and image.has_note
    ]
    if notes:
        sys.stdout.write("\n")
        show(("backend", "field", "fit", "note"), notes, sys.stdout)


def _lines(row: ExplainedField, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a field's translation for each backend, with its note below."""
    for name in names:
        if image := row.images.get(name):
            yield name, _becomes(image)
            if image.has_note:
                yield "", image.note


def _becomes(image: Image | None) -> str:
    if image is None:
        return ""
    return image.native if image.off else f"{image.fit}: {image.native}"
