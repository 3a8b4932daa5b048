"""`unishard explain`: show every value, its origin, and its translation for every installed backend."""

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
from unishard.config.describe import bare
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
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only what the file and --set set, not the defaults.")
    ] = False,
    set_: Overrides = None,
    world_size: Ranks = None,
    gpus_per_node: RanksPerNode = None,
) -> None:
    """Show every value and its translation.

    For each field of the config: its value, its origin, and what it becomes on each installed backend. A field that is
    off says so. With --model, also which parameters the optimizer updates, how, and which are frozen.

    Example: unishard explain cfg.yaml deepspeed --changed
    """
    from unishard.config.loading import read

    if native and changed:
        raise typer.BadParameter("--native prints the whole native config; leave out --changed")

    backend = backend and backend.lower()
    with own_file(config):
        cfg, origins = read(config, set_ or ())
    try:
        ranks = run_ranks(cfg, world_size, gpus_per_node)
        if native:
            _print_native(cfg, backend, model, ranks.topology)
        else:
            _show(cfg, origins, backend, ranks.topology, changed=changed)
            if model is not None:
                _show_updates(cfg, model)
    except ConfigError as error:
        raise origins.locate(error) from None
    note_ranks(ranks)


def _print_native(cfg: Config, backend: str | None, model: str | None, topology: Topology) -> None:
    from unishard.contract.translate import translate
    from unishard.tools.plan.model import PlannedModel

    if model is not None:
        native = PlannedModel(model, cfg).native(backend or cfg.backend, topology)
    else:
        native = translate(cfg, backend=backend, topology=topology).check(strict=cfg.strict).native
    emit(json.dumps(native, indent=2, allow_nan=False))


def _show(cfg: Config, origins: Origins, backend: str | None, topology: Topology, *, changed: bool) -> None:
    from unishard.contract import registry
    from unishard.contract.explain import explain as rows_of

    rows = rows_of(cfg, origins, topology)
    names = [registry.get(backend).name] if backend else sorted({name for row in rows for name in row.images})
    if changed:
        rows = [row for row in rows if row.is_set and any(name in row.images for name in names)]
        if not rows:
            echo("nothing is set; every field has its default")
            return
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
