"""What `prepare` would refuse of a config on this machine, before there is a model.

Needs torch only where a field does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from unishard.checkpoint import finding, manifest
from unishard.checkpoint.remote import store
from unishard.config import Checkpoint, Config
from unishard.config.batch_sizes import check_batch
from unishard.config.data_share import data_share_of
from unishard.config.describe import bare
from unishard.config.shard_groups import check_groups
from unishard.config.topology import Topology
from unishard.contract import registry, tested_versions
from unishard.contract.report import Translation
from unishard.contract.rules import Fit
from unishard.contract.translate import require_installed
from unishard.engine.state.lineage import Lineage
from unishard.errors import BackendError, CheckpointError, ConfigError, Problem
from unishard.nvme.file_systems import in_memory
from unishard.observe.destinations import table
from unishard.tools.doctor.imports import quietly


def refusals_of(cfg: Config, topology: Topology) -> Iterator[Problem]:
    """Yield what `prepare` and the first save would refuse, whatever the model is.

    Imports an engine only where a field needs it.
    """
    yield from _raised_by(lambda: check_batch(cfg.training, data_share_of(cfg, topology).of))
    yield from _raised_by(lambda: check_groups(cfg, topology))
    unknown = list(_raised_by(lambda: require_installed(cfg)))
    yield from unknown
    if cfg.backend in registry.available():
        yield from _refused_by_backend(cfg, topology)
    if cfg.offload.nvme_path is not None and (problem := in_memory(Path(cfg.offload.nvme_path))):
        yield Problem("offload.nvme_path", problem)
    yield from _checkpoint_refusals(cfg.checkpoint)
    yield from _raised_by(lambda: store.require_installed(cfg.checkpoint))
    yield from _raised_by(lambda: table.require_installed(cfg.logging))


def notes_on(cfg: Config, topology: Topology) -> Iterator[str]:
    """Yield what a run would report for a config that is not refused."""
    backend = registry.get(cfg.backend)
    for line in backend.translate(cfg, topology).report.of(Fit.APPROXIMATE):
        yield f"{line.path}: {bare(line.value)} is only approximate on {backend.name}: {line.note}"
    if odd := tested_versions.untested(backend):
        yield odd
    root = _root(cfg.checkpoint)
    newest = root and finding.latest(root)
    if root is None or newest is None:
        return
    if cfg.checkpoint.on_existing == "resume":
        yield f"checkpoint.on_existing: the run resumes from {newest}"
    try:
        Lineage(root, "new" if cfg.checkpoint.on_existing == "resume" else cfg.checkpoint.on_existing).admit()
    except CheckpointError as error:  # the first update raises it, unless the script loads one of them
        yield f"checkpoint.dir: {error}"


def _raised_by(check: Callable[[], object], path: str = "") -> Iterator[Problem]:
    """Yield the problems of an error; those of an error without fields stand at `path`."""
    try:
        check()
    except ConfigError as error:
        yield from error.problems
    except (BackendError, CheckpointError) as error:
        yield Problem(path, str(error))


def _refused_by_backend(cfg: Config, topology: Topology) -> Iterator[Problem]:
    backend = registry.get(cfg.backend)
    translation: Translation | None = None
    try:
        translation = backend.translate(cfg, topology)
        translation.check(strict=cfg.strict)
    except ConfigError as error:
        yield from error.problems
    if install := registry.missing(backend):
        yield Problem("backend", f"{cfg.backend!r} needs packages that are not installed; {install}")
        return
    with quietly():
        problems = [] if translation is None else list(_raised_by(lambda: backend.require(cfg, translation), "backend"))
        problems += _refused_by_torch(cfg)
    yield from problems


def _refused_by_torch(cfg: Config) -> Iterator[Problem]:
    if cfg.optimizer.name == "lion":
        from unishard.engine.optim.optimizers import require_package

        yield from _raised_by(lambda: require_package(cfg.optimizer))
    if cfg.compile.mode != "none" and "backend" in cfg.compile.changed:
        from unishard.engine.model.compilation import require_backend

        yield from _raised_by(lambda: require_backend(cfg.compile))


def _checkpoint_refusals(cfg: Checkpoint) -> Iterator[Problem]:
    root = _root(cfg)
    if root is None:
        return
    unreadable = list(_raised_by(lambda: finding.latest(root), "checkpoint.dir"))
    yield from unreadable
    if unreadable:
        return
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        yield Problem(
            "checkpoint.dir", f"{root}: cannot create a checkpoint here (Permission denied); choose a writable folder"
        )
    newest = finding.latest(root)
    if newest is not None and cfg.on_existing == "resume":
        yield from _raised_by(lambda: manifest.read(newest), "checkpoint.on_existing")


def _root(cfg: Checkpoint) -> Path | None:
    return None if cfg.dir is None else Path(cfg.dir).absolute()
