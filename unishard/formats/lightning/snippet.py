"""Python from LightningCLI's sections: the strategy, the Trainer, and a class to mix into the LightningModule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from unishard.config.nested import Native
from unishard.formats.lightning.keys import CALLBACKS
from unishard.formats.lightning.saving import minutes_of
from unishard.formats.lightning.shape import Shape, built, short
from unishard.formats.reading import ReadDocument

_BLOCKS = ("auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing")
_POLICY = '''

def blocks(*names):
    """Modules of these classes, for FSDP's policies."""
    return partial(lambda_auto_wrap_policy, lambda_fn=lambda module: type(module).__name__ in names)
'''
_CLIPPING = """
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        # Lightning refuses to clip by norm with FSDP; FSDP's root knows the norm over all ranks.
        if gradient_clip_val:
            self.trainer.model.clip_grad_norm_(gradient_clip_val)
"""
_SCALER_LATER = "# FSDPPrecision(scaler=...) raises in Lightning 2.6.6, so the scaler is set afterwards."


_HOMES = {
    "Strategy": "lightning.pytorch.strategies",
    "Logger": "lightning.pytorch.loggers",
    "Environment": "lightning.pytorch.plugins.environments",
    **dict.fromkeys(CALLBACKS, "lightning.pytorch.callbacks"),
}
"""Where classes stand that people name without their module, as LightningCLI lets them."""


class _Code:
    """Python rules, and the imports that they need."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.policy = False

    def class_(self, path: str) -> str:
        """The name of a class, imported; a name without a module is taken as one of the script's."""
        module, _, name = path.rpartition(".")
        module = module or next((home for word, home in _HOMES.items() if name.endswith(word)), "")
        if module:
            self.imports.add(f"from {module} import {name}")
        return name

    def value(self, value: Any, indent: int) -> str:
        """A value; a class with arguments as a call, torch's formats by name."""
        found = built(value) if isinstance(value, Mapping) else None
        if found and found.key:
            return self.call(found.path, found.arguments, indent)
        if isinstance(value, str) and value.startswith("torch."):
            self.imports.add("import torch")
            return value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            return f"[{', '.join(self.value(item, indent) for item in value)}]"
        return _literal(value, indent)

    def call(self, path: str, arguments: Mapping[str, Any], indent: int = 0) -> str:
        """A call with keyword arguments, one a line where there are several."""
        if short(path).endswith("_policy"):
            return self._partial(path, arguments, indent)
        name = self.class_(path)
        said = [f"{key}={self.argument(key, value, indent + 4)}" for key, value in arguments.items()]
        if len(said) < 2 and "\n" not in "".join(said):
            return f"{name}({', '.join(said)})"
        inner = "".join(f"{' ' * (indent + 4)}{text},\n" for text in said)
        return f"{name}(\n{inner}{' ' * indent})"

    def _partial(self, path: str, arguments: Mapping[str, Any], indent: int) -> str:
        """A policy with some of its arguments."""
        self.imports.add("from functools import partial")
        name = self.class_(path)
        return (
            f"partial({', '.join([name, *(f'{key}={self.value(value, indent)}' for key, value in arguments.items())])})"
        )

    def argument(self, key: str, value: Any, indent: int) -> str:
        """A value of a keyword that is said in a way of its own."""
        if key in _BLOCKS and isinstance(value, list):
            self.policy = True
            self.imports |= {
                "from functools import partial",
                "from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy",
            }
            return f"blocks({', '.join(_literal(short(name), 0) for name in value)})"
        if key == "train_time_interval" and isinstance(value, str):
            self.imports.add("from datetime import timedelta")
            return f"timedelta(minutes={minutes_of(value)!r})"
        if key in ("device_mesh", "betas") and isinstance(value, list):
            return repr(tuple(value))
        return self.value(value, indent)


class _Name(str):
    """An expression as it is."""

    __slots__ = ()


def _literal(value: Any, indent: int) -> str:
    """A plain value as Python, a mapping over several lines if it is long."""
    match value:
        case _Name():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            ends = "[]" if isinstance(value, list) else "()"
            return ends[0] + ", ".join(_literal(item, indent) for item in value) + ends[1]
        case Mapping():
            items = [f"{_literal(key, indent)}: {_literal(item, indent + 4)}" for key, item in value.items()]
            short_ = "{" + ", ".join(items) + "}"
            if len(short_) + indent <= 100 and "\n" not in short_:
                return short_
            return "{\n" + "".join(f"{' ' * (indent + 4)}{item},\n" for item in items) + " " * indent + "}"
    return repr(value)


def snippet(document: Native, reading: ReadDocument) -> str:
    """The text of a Python file that builds `strategy` and, in `trainer()`, the Trainer."""
    if not document:
        return f"# Lightning has no strategy for backend {reading.config.backend}.\n"
    shape, code = Shape.of(document), _Code()
    top = shape.beside(document) if shape.trainer != shape.top else document
    arguments = {
        key: value for key, value in shape.trainer_in(document).items() if key not in ("seed_everything", *_SECTIONS)
    }
    strategy = _strategy(code, document if shape.bare else arguments.pop("strategy", None))
    if shape.bare:
        arguments = {
            key: value
            for key, value in arguments.items()
            if key not in ("class_path", "_target_", "init_args", "dict_kwargs")
        }
    parts = [
        strategy,
        *_plugins(code, arguments),
        _trainer(code, arguments, top.get("seed_everything")),
        *_module(code, top, arguments, strategy),
    ]
    body = "\n".join(parts)
    policy = _POLICY + "\n\n" if code.policy else "\n"
    return f"{_header(reading, strategy)}{_sorted(code.imports)}{policy}{body}"


_SECTIONS = ("optimizer", "lr_scheduler")


def _strategy(code: _Code, value: Any) -> str:
    found = built(value)
    if found is None or not found.key:
        return f"strategy = {_literal(value or 'auto', 0)}\n"
    return f"strategy = {code.call(found.path, found.arguments)}\n"


def _plugins(code: _Code, arguments: dict[str, Any]) -> Iterable[str]:
    """A precision plugin whose scaler cannot be an argument."""
    plugins = arguments.get("plugins")
    found = built(plugins[0]) if isinstance(plugins, list) and len(plugins) == 1 else None
    if found is None or short(found.path) != "FSDPPrecision" or "scaler" not in found.arguments:
        return
    given = dict(found.arguments)
    scaler = built(given.pop("scaler"))
    arguments["plugins"] = _Name("[precision]")
    made = code.call(found.path, given)
    scaled = code.call(scaler.path, scaler.arguments) if scaler else "None"
    yield f"{_SCALER_LATER}\nprecision = {made}\nprecision.scaler = {scaled}\n"


def _trainer(code: _Code, arguments: Mapping[str, Any], seed: Any) -> str:
    code.imports.add("from lightning.pytorch import Trainer")
    lines = []
    if seed not in (None, False):
        code.imports.add("from lightning.pytorch import seed_everything")
        lines.append(
            f"seed_everything({seed if seed is not True else ''}{', ' if seed is not True else ''}workers=True)"
        )
    call = code.call("Trainer", {"strategy": _Name("strategy"), **arguments}, 4)
    lines.append(f"return {call}")
    inner = "".join(f"    {line}\n" for line in lines)
    return f'\ndef trainer():\n    """Call it in your script, then trainer().fit(model, loader)."""\n{inner}'


def _module(code: _Code, top: Mapping[str, Any], arguments: Mapping[str, Any], strategy: str) -> Iterable[str]:
    """A class for the LightningModule, if there is something that only it can do."""
    methods = []
    found = built(top.get("optimizer"))
    if found and found.key:
        methods.append(
            f"\n    def configure_optimizers(self):\n        return {_optimizer(code, found.path, found.arguments)}\n"
        )
    if arguments.get("gradient_clip_val") and "FSDPStrategy(" in strategy:
        methods.append(_CLIPPING)
    if methods:
        yield f'\nclass Recipe:\n    """Mix it in: class Model(Recipe, LightningModule)."""\n{"".join(methods)}'


def _optimizer(code: _Code, path: str, arguments: Mapping[str, Any]) -> str:
    said = ", ".join(
        ["self.parameters()", *(f"{key}={code.argument(key, value, 8)}" for key, value in arguments.items())]
    )
    return f"{code.class_(path)}({said})"


def _header(reading: ReadDocument, strategy: str) -> str:
    lines = [f"# For Lightning 2.6.6, made from a config of {reading.format}."]
    if "FSDPStrategy(" in strategy and "auto_wrap_policy" not in strategy:
        needed = "HYBRID" in strategy and "device_mesh" not in strategy
        otherwise = "Lightning refuses HYBRID_SHARD" if needed else "the full model is gathered at once"
        lines.append(f"# Set auto_wrap_policy to your model's block class, or {otherwise}.")
    for path, undecided in reading.undecided.items():
        lines.append(f"# Needs your decision: {path}, which comes from {undecided.who}.")
    if "training.micro_batch_size" in reading.decided - reading.undecided.keys():
        lines.append(f"# Make your DataLoader with batch_size={reading.config.training.micro_batch_size}.")
    return "\n".join(lines) + "\n\n"


def _sorted(imports: Iterable[str]) -> str:
    """The imports, those from one module in one line."""
    names: dict[str, set[str]] = {}
    for line in imports:
        module, _, name = line.removeprefix("from ").partition(" import ")
        names.setdefault(module if name else line, set()).update({name} - {""})
    lines = [f"from {module} import {', '.join(sorted(found))}" if found else module for module, found in names.items()]
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: (line.startswith("from"), line)))
