"""Private names of the engines stand in each backend's `private/`, and each one there stands in its table, with a
probe."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from unishard.contract.private_api import CORE_PRIVATE_API

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("unishard_deepspeed", "unishard_fsdp")
PACKAGES = (*BACKENDS, "unishard_arguments")
ENGINES = ("torch", "deepspeed")
OWN = {"self", "cls"}
ALLOWED = {
    "_replace": "of a named tuple",
    "_forward_pre_hooks": "torch has no other list of a module's hooks, by which DeepSpeed's handles are told apart",
    "_forward_hooks": "as above",
    "hooks_dict_ref": "as above: of torch's RemovableHandle",
    "_asdict": "of a named tuple",
    "_current_frames": "of Python's sys, which documents it",
    "_exit": "of Python's os, which documents it",
    "cache_clear": "of Python's functools.lru_cache, which documents it",
    "getclosurevars": "of Python's inspect, which documents it",
    "isfunction": "as above",
    "nonlocals": "as above",
}
"""Names that need no PrivateApi, and why."""

OF_TRANSFORMERS = {
    "_attn_implementation",
    "_auto_class",
    "_from_config",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "_name_or_path",
}
"""What its own loading and saving use; it documents no other way."""

ASKED_FOR = {
    "_compiled_call_impl": "of torch's module.compile(), with a default: without it, compiling twice is not noticed",
    "_saved_other": "of torch's autograd nodes, with a default: without it, a loss that is divided by hand is not "
    "noticed",
    "_saved_reduction": "of torch's autograd nodes, with a default: without it, a mean with num_items is not noticed",
    "_base": "of torch's tensors, with a default: without it, an in-place operation on a view of a unit is not refused "
    "by this message, and a view of a weight that is passed to a block is copied to the host with its activations",
    "_orig_mod": "of torch.compile's module, by hasattr: without it, a compiled model is not refused by this message",
    "_checkpoint_wrapped_module": "of torch's checkpoint_wrapper, by hasattr: without it, a wrapped module is not "
    "refused by this message",
    "_schedulers": "of torch's SequentialLR and ChainedScheduler, with a default: without it, the schedulers inside "
    "are not asked",
    "_no_split_modules": "of transformers, with a default: classes of a model's blocks; without it they are found by "
    "repetition",
    "_hf_peft_config_loaded": "of transformers, with a default: its mark of a model with adapters; it documents no "
    "other",
    "_tied_weights_keys": "of transformers, with a default: the ties that a class declares, which its save_pretrained "
    "leaves out",
    "_keys_to_ignore_on_load_missing": "of transformers, with a default: it only adds a hint to an error",
    "_name_or_path": "of transformers' configs, with a default: the folder of an adapter's base model, for its "
    "tokenizer",
    "_make": "of a named tuple, documented by Python",
    "_fields": "of a named tuple, documented by Python",
}
"""Names that the core asks an object for by a string, and why each needs no PrivateApi."""

DOCUMENTED = {
    "unishard_deepspeed": {
        "deepspeed": {"initialize", "init_distributed", "zero", "Init"},
        # https://deepspeed.readthedocs.io/en/latest/zero3.html, "Modifying Partitioned States".
        "parameter": {"ds_tensor", "ds_shape"},
        "engine": {
            *("module", "optimizer", "zero_grad", "zero_optimization_partition_gradients", "was_step_applied"),
            "get_global_grad_norm",
        },
        "accelerator": {"device_name"},
    },
}
"""What the engine's own documentation tells of, by what it belongs to."""


def files(package: str) -> list[Path]:
    return sorted((ROOT / "backends" / package).rglob("*.py"))


def in_patches(path: Path) -> bool:
    return "private" in path.parts


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each `x._name`, but on a file's own objects, and of each import of a private name of an
    engine."""
    parsed = tree(path)
    own = defined(parsed)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and private(node.attr):
            on_own = isinstance(node.value, ast.Name) and node.value.id in OWN
            if not on_own and node.attr not in own and node.attr not in ALLOWED:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ENGINES:
            hidden = [part for part in (node.module or "").split(".") if private(part)]
            yield from (
                (node.lineno, name) for name in (*hidden, *(alias.name for alias in node.names)) if private(name)
            )
        elif isinstance(node, ast.Import):
            parts = [
                part for alias in node.names if alias.name.split(".")[0] in ENGINES for part in alias.name.split(".")
            ]
            yield from ((node.lineno, part) for part in parts if private(part))


def defined(parsed: ast.AST) -> set[str]:
    """Names that a tree defines: functions, classes, and what they set on themselves."""
    found = {node.name for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    set_somewhere = [
        node for node in ast.walk(parsed) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return found | {node.attr for node in set_somewhere if isinstance(node.value, ast.Name) and node.value.id in OWN}


@cache
def table(package: str) -> frozenset[str]:
    """Every last part of a private name in a backend's table."""
    patches = importlib.import_module(f"{package}.private").PRIVATE_API
    names = [name for patch in patches.values() for alternatives in patch.names for name in alternatives.split(" or ")]
    return frozenset(part for name in names for part in name.replace(":", ".").split("."))


@cache
def known(package: str) -> frozenset[str]:
    """Attributes of Python's and torch's objects, of this backend's, of unishard's that it uses, and what the engine
    documents."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    objects: list[Any] = [
        torch,
        torch.Tensor,
        torch.nn,
        torch.nn.Module,
        torch.nn.Parameter,
        torch.optim,
        torch.optim.Optimizer,
    ]
    objects += [
        torch.cuda,
        torch.cuda.Stream,
        dist,
        dist.Work,
        dist.ReduceOp,
        DeviceMesh,
        torch.utils.hooks.RemovableHandle,
        torch.device,
        torch.Size,
    ]
    objects += [
        str,
        list,
        dict,
        set,
        tuple,
        int,
        float,
        slice,
        property,
        type,
        type(len),
        FrameType,
        Path,
        ExitStack,
        builtins,
        importlib.import_module("warnings"),
    ]
    own = {name for path in (*files(package), *(ROOT / "unishard").rglob("*.py")) for name in declared(tree(path))}
    told = {name for names in DOCUMENTED.get(package, {}).values() for name in names}
    return frozenset({name for each in objects for name in dir(each)} | own | told | {"modules", "__class__"})


def declared(parsed: ast.AST) -> Iterator[str]:
    """Names that a tree defines or annotates, and the modules that it is made of."""
    yield from defined(parsed)
    for node in ast.walk(parsed):
        if isinstance(node, ast.AnnAssign):
            yield node.target.id if isinstance(node.target, ast.Name) else getattr(node.target, "attr", "")
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT / "backends" if path.is_relative_to(ROOT / "backends") else ROOT))


OUTSIDE = [path for package in PACKAGES for path in files(package) if not in_patches(path)]
INSIDE = [(package, path) for package in PACKAGES for path in files(package) if in_patches(path)]


@pytest.mark.parametrize("path", OUTSIDE, ids=_id)
def test_no_private_name_of_an_engine_is_used_outside_patches(path: Path) -> None:
    found = [f"{_id(path)}:{line}: {name}" for line, name in private_names(path)]
    assert not found, f"move these to private/, with a PrivateApi that probes for them: {found}"


@pytest.mark.parametrize(("package", "path"), INSIDE, ids=lambda each: each if isinstance(each, str) else _id(each))
def test_each_name_of_an_engine_that_patches_use_stands_in_the_table(package: str, path: Path) -> None:
    """Most of DeepSpeed's have no underscore: every attribute counts that is not one of Python's, torch's, or our
    own."""
    used = {name for _, name in private_names(path)}
    used |= {
        node.attr
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr not in known(package)
    }
    used |= {name for name in strings_asked_for(path) if name not in known(package)}
    untold = used - table(package) - ALLOWED.keys()
    assert not untold, f"{_id(path)} uses names of the engine that no PrivateApi has: {sorted(untold)}"


def test_the_core_uses_no_private_name_of_an_engine_but_those_of_its_table() -> None:
    paths = sorted((ROOT / "unishard").rglob("*.py"))
    own = {name for path in paths for name in defined(tree(path))} - {"_buffers", "_parameters"}
    told = {
        part
        for patch in CORE_PRIVATE_API.values()
        for name in patch.names
        for part in name.replace(":", ".").split(".")
    } | OF_TRANSFORMERS
    found = [
        f"{path.name}:{line}: {name}" for path in paths for line, name in private_names(path) if name not in own | told
    ]
    asked = {(path.name, name) for path in paths for name in strings_asked_for(path) if private(name)}
    found += [f"{file}: {name}" for file, name in sorted(asked) if name not in own | told | ASKED_FOR.keys()]
    assert not found, f"use a documented name, or add a PrivateApi to unishard/contract/private_api.py: {found}"
    assert ASKED_FOR.keys() <= {name for _, name in asked}, "drop what is no longer asked for from ASKED_FOR"


def strings_asked_for(path: Path) -> Iterator[str]:
    """Names in `getattr(x, "name")` and the like."""
    for node in ast.walk(tree(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
        ):
            yield from (
                each.value for each in node.args[1:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


@pytest.mark.parametrize("package", BACKENDS)
def test_each_name_in_the_table_is_used(package: str) -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in files(package) if in_patches(path) and path.stem != "table"
    )
    patches = importlib.import_module(f"{package}.private").PRIVATE_API
    last = {
        name.replace(":", ".").rpartition(".")[2]
        for patch in patches.values()
        for each in patch.names
        for name in each.split(" or ")
    }
    assert not {name for name in last if name not in text}


def test_a_private_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "from torch.distributed._composable import replicate\n"
        "def f(engine):\n    return engine.optimizer._secret or getattr(engine, '_hidden', None) or hasattr(engine, "
        "'shown')\n"
    )
    assert [name for _, name in private_names(path)] == ["_composable", "_secret"]
    assert sorted(strings_asked_for(path)) == ["_hidden", "shown"]
