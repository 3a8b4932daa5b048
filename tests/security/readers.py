"""Everything that reads a file from outside: how to lay out a good one, and how it is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed_files import lay_out
from documents import SEEDS
from safetensors.torch import save_file
from stored import store
from test_hostile import plain

import unishard
from unishard.checkpoint import finding, manifest, verifying
from unishard.checkpoint.convert import convert
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.export.tokenizers import tokenizer_files as tokenizer_of
from unishard.checkpoint.manifest import FileFacts
from unishard.cli.checkpoint_facts import facts_of, groups_of, kinds_of
from unishard.config import Config
from unishard.config.loading.hostfile import hosts_of
from unishard.contract.model_shape import ModelShape, ParameterShape
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.engine.model import weight_files
from unishard.engine.resolve import observe_spec, text_of
from unishard.formats import catalog, translate
from unishard.formats.advice.surveying import survey
from unishard.formats.beside.engine_choice import PLAIN, RECIPES
from unishard.observe.destinations.jsonl import JsonLines
from unishard.tools.compare.golden import read_golden
from unishard.tools.compare.modules import modules_in
from unishard.tools.compare.records import Course, middle, read_records
from unishard.tools.plan import model
from unishard.tools.plan.model import PlannedModel

__all__ = ["READERS", "Reader"]

CFG = (
    "backend: fsdp\nsharding: full_shard\ntraining: {micro_batch_size: 2, seed: 3}\noptimizer: {name: adamw, lr: "
    "1e-3}\n"
)


class Reader(NamedTuple):
    """Where a file from outside is read."""

    lay_out: Callable[[Path], Path]
    """Writes what is good into a folder; returns the file that will be another one."""
    read: Callable[[Path], Any]
    """Reads that file as a user has it read, given its path."""
    slow: bool = False
    """Whether one reading takes more than a few milliseconds."""
    own: bool = False
    """Whether only this user's processes write it, so that it may be as long as it likes."""


def _file(name: str, content: str | bytes, **others: str) -> Callable[[Path], Path]:
    def lay(folder: Path) -> Path:
        for other, text in others.items():
            (folder / other.replace("_", ".")).write_text(text)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / name

    return lay


def _document(name: str) -> Reader:
    as_it_is = name not in catalog.writable()
    content = json.dumps(SEEDS[name][0]) if as_it_is else translate(SEEDS[name][0], name, from_=name).text
    suffix = ".json" if as_it_is else catalog.get(name).suffix
    engine = (PLAIN,) if name in RECIPES else ()
    return Reader(_file(f"config{suffix}", content), lambda path: translate(path, "unishard", overrides=engine))


def _beside(path: Path) -> None:
    given = path.with_name("ds.json")
    given.write_text(json.dumps(SEEDS["deepspeed"][0]))
    translate(given, "unishard", with_=str(path))


def _named(path: Path) -> None:
    beside = path.with_name("arguments.yaml")
    beside.write_text(json.dumps({"deepspeed": path.name, "bf16": True}))
    translate(beside, "unishard", from_="hf")
    beside.write_text(
        json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": path.name}})
    )
    translate(beside, "unishard", from_="accelerate")


def _checkpoint(folder: Path) -> Path:
    """A checkpoint of ours in `step-00000030`, with what an export needs."""
    here = folder / "step-00000030"
    assets = {
        "assets/export.json": b'{"kind": "model", "names": {"model": {"w": "a.weight"}}}',
        "assets/config.json": b'{"dtype": "float32"}',
    }
    groups = [GroupRecord(names=["a.weight"], options={"lr": 0.1})]
    made = store(
        here,
        optimizer=OptimizerFacts(class_name="SGD", groups=groups),
        data=[{"epoch": 1}],
        state={"note": {"$tuple": [1]}},
    )
    for name, content in assets.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content)
    import zlib

    files = made.files | {
        name: FileFacts(bytes=len(each), crc32=f"{zlib.crc32(each):08x}") for name, each in assets.items()
    }
    text = made.model_copy(update={"files": files}).model_dump_json(exclude={"crc32"})
    (here / manifest.FILE).write_text(text)  # without its checksum: whoever writes the file can write that too
    (folder / "latest").write_text("step-00000030\n")
    return here


def _inside(name: str) -> Callable[[Path], Path]:
    return lambda folder: _checkpoint(folder) / name


def _read_ours(path: Path) -> None:
    """As `unishard checkpoint list`, `inspect`, `verify`, `unishard checkpoint export` and a load do."""
    here = path.parent if path.parent.name != "assets" else path.parent.parent
    finding.latest(here.parent)
    found = manifest.read(here)
    list(facts_of(str(here), 0, found)), kinds_of(found), groups_of(found)
    verifying.damaged(here, found)
    verifying.hashes_of(here, found, lambda read: None)
    try:
        export_checkpoint(here, here.parent / "out")
    finally:
        shutil.rmtree(here.parent / "out", ignore_errors=True)


def _convert(path: Path) -> None:
    root = next(each for each in path.parents if each.name == "theirs")
    try:
        convert(root, root.parent / "out")
    finally:
        shutil.rmtree(root.parent / "out", ignore_errors=True)


def _deepspeed(pattern: str, stage: int = 2) -> Reader:
    def lay(folder: Path) -> Path:
        lay_out(folder / "theirs", [{"a.weight": (3, 5)}], stage=stage, step=3)
        return next((folder / "theirs").glob(pattern))

    return Reader(lay, _convert, slow=True)


def _weights(folder: Path) -> Path:
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def _read_weights(path: Path) -> None:
    weight_files.shapes_of(path.parent, weight_files.files_of(path.parent))


def _indexed(folder: Path) -> Path:
    _weights(folder)
    return _file(
        weight_files.INDEX,
        '{"metadata": {"total_size": 28}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}',
    )(folder)


_SHAPE = ModelShape((ParameterShape("a", (3, 5), "float32", True, 0),), (), ("Block",))


def _cached(folder: Path) -> Path:
    model.cached_shape(["a"], lambda: _SHAPE)
    return next(model.cache_folder().glob("*.json"))


def _read_cache(path: Path) -> None:
    assert model.cached_shape(["a"], lambda: _SHAPE) == _SHAPE
    if path.is_file():  # what was stored again
        path.unlink()


def _planned(path: Path) -> None:
    PlannedModel(str(path.parent), Config.model_validate({"training": {"micro_batch_size": 1}}))


LOG = "".join(
    json.dumps({"step": step, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "step_seconds": 0.5}) + "\n"
    for step in range(1, 4)
)
MODULES = (
    json.dumps({"step": 1, "module": "a", "rms": 1.0, "mean": 0.5})
    + "\n"
    + json.dumps({"step": 1, "parameter": "a", "norm": 1.0})
    + "\n"
)


def _log(path: Path) -> None:
    records = read_records(path)
    Course.of(records), middle(records, "loss"), modules_in(LOG)


def _golden(path: Path) -> None:
    read_golden(path), modules_in(path.read_text(errors="replace"))


def _resumed(path: Path) -> None:
    cfg = Config.model_validate(
        {"training": {"micro_batch_size": 1}, "logging": {"to": ["jsonl"], "dir": str(path.parent)}}
    )
    writer = JsonLines(observe_spec(cfg, text_of(cfg)))
    writer.resume(2)
    writer.close()


READERS: dict[str, Reader] = {
    "a config": Reader(_file("cfg.yaml", CFG), lambda path: unishard.load(path)),
    "a config as JSON": Reader(
        _file("cfg.json", json.dumps({"backend": "fsdp", "training": {"seed": 3}})), lambda path: unishard.load(path)
    ),
    **{f"a config of {name}": _document(name) for name in SEEDS},
    "arguments beside a config": Reader(
        _file("args.yaml", "bf16: true\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nsave_steps: 10\n"), _beside
    ),
    "a file that a config names": Reader(_file("named.json", json.dumps(SEEDS["deepspeed"][0])), _named),
    "a project": Reader(
        _file("ds.json", json.dumps(SEEDS["deepspeed"][0])),
        lambda path: list(survey(path.parent, "unishard")),
    ),
    "a hostfile": Reader(_file("hosts", "a slots=4\nb slots=4\n"), hosts_of),
    "a manifest": Reader(_inside(manifest.FILE), _read_ours, slow=True),
    "latest": Reader(lambda folder: _checkpoint(folder).parent / "latest", lambda path: finding.latest(path.parent)),
    "the index of a checkpoint": Reader(_inside(".metadata"), _read_ours, slow=True),
    "the tensors of a checkpoint": Reader(_inside("__0_0.distcp"), _read_ours, slow=True),
    "the names of an export": Reader(_inside("assets/export.json"), _read_ours, slow=True),
    "the config of an export": Reader(_inside("assets/config.json"), _read_ours, slow=True),
    "the index of another tool's checkpoint": Reader(
        lambda folder: plain(folder / "theirs") / ".metadata", _convert, slow=True
    ),
    "the tensors of another tool's checkpoint": Reader(
        lambda folder: plain(folder / "theirs") / "__0_0.distcp", _convert, slow=True
    ),
    "DeepSpeed's model": _deepspeed("*/*model_states.pt"),
    "DeepSpeed's optimizer": _deepspeed("*/*rank_0_*optim_states.pt"),
    "DeepSpeed's optimizer at stage 3": _deepspeed("*/*rank_1_*optim_states.pt", stage=3),
    "DeepSpeed's latest": _deepspeed("latest"),
    "weights": Reader(_weights, _read_weights),
    "the index of weights": Reader(_indexed, _read_weights),
    "a tokenizer": Reader(_file("tokenizer.json", "{}"), lambda path: tokenizer_of(path.parent)),
    "the config of a model": Reader(_file("config.json", '{"model_type": "llama"}'), _planned),
    "a cached shape": Reader(_cached, _read_cache),
    "a golden file": Reader(_file("golden.jsonl", LOG + MODULES), _golden),
    "the log of a run": Reader(_file("log.jsonl", LOG), _log, own=True),
    "the log of a resumed run": Reader(_file("log.jsonl", LOG), _resumed, own=True),
}
