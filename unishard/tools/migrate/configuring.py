"""The config that takes the place of what a script says itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import libcst as cst

from unishard.config.sharding import Strategy
from unishard.errors import UnishardError
from unishard.tools.migrate.facts import ScriptFacts, argument, code, names_in

_TOLD = ("approximate", "unsupported")
_WORDS = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}


def config_of(facts: ScriptFacts, notes: list[str]) -> str:
    """The statement that loads the config.

    Args:
        facts: What the script says.
        notes: Gets what it cannot tell.
    """
    fields = _of_deepspeed(facts, notes) if facts.kind == "initialize" else _of_script(facts, notes)
    if fields is None:
        return 'cfg = unishard.load("train.yaml")'
    lines = [f"        {key!r}: {_source(value)},\n" for key, value in fields.items()]
    return f"cfg = unishard.load(\n    {{\n{''.join(lines)}    }}\n)".replace("'", '"')


def _source(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_source(each)}" for key, each in value.items()) + "}"
    return code(value) if isinstance(value, cst.CSTNode) else repr(value)


def _of_script(facts: ScriptFacts, notes: list[str]) -> dict[str, Any]:
    training = {name: value for name, value in _training(facts) if value is not None}
    for name, value in list(training.items()):
        if not names_in(value) <= facts.known(facts.anchor):
            notes.append(f"set training.{name} in cfg to {code(training.pop(name))}, which is not known here")
    fields = {"backend": "fsdp", "sharding": _strategy(facts, notes), "precision": _precision(facts, notes)}
    return {name: value for name, value in {**fields, "training": training}.items() if value}


def _training(facts: ScriptFacts) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    yield "micro_batch_size", next((argument(facts.loaders[name], "batch_size", 1) for name in facts.trained), None)
    if facts.accelerate is not None:
        yield "gradient_accumulation_steps", argument(facts.accelerate, "gradient_accumulation_steps")
    elif facts.steps is not None:
        yield "gradient_accumulation_steps", cst.parse_expression(facts.steps)
    yield "gradient_clipping", facts.clip


def _strategy(facts: ScriptFacts, notes: list[str]) -> object:
    if facts.kind == "prepare":
        notes.append("what `accelerate config` has decided: `unishard translate FILE --to unishard -o train.yaml`")
    asked = [argument(facts.wrap, name) for name in ("sharding_strategy", "reshard_after_forward")]
    word = " ".join(code(each).rpartition(".")[2].lower() for each in asked if each)
    strategy = "no_shard" if facts.kind in ("DistributedDataParallel", "prepare") else "full_shard"
    if word in ("shard_grad_op", "false"):  # FSDP's own, which is not ZeRO-2
        return {"strategy": "full_shard", "reshard_after_forward": False}
    return word if word in get_args(Strategy) else strategy


def _precision(facts: ScriptFacts, notes: list[str]) -> str | None:
    asked = [
        argument(facts.accelerate, "mixed_precision"),
        argument(facts.autocast, "dtype", 1),
        argument(facts.wrap, "mp_policy") or argument(facts.wrap, "mixed_precision"),
    ]
    for each in filter(None, asked):
        text = code(facts.literals.get(code(each), each))
        found = next((word for part, word in _WORDS.items() if part in text), None)
        if found is None and text.strip("\"'") != "no":
            notes.append(f"set precision in cfg to what {text} says")
        return found
    return "fp16" if facts.scaler else None


def _of_deepspeed(facts: ScriptFacts, notes: list[str]) -> dict[str, Any] | None:
    """DeepSpeed's config, translated where the script holds it."""
    from ruamel.yaml import YAML

    from unishard import formats

    given = argument(facts.wrap, "config") or argument(facts.wrap, "config_params")
    try:
        native = ast.literal_eval(code(facts.literals.get(code(given), given))) if given else None
        if isinstance(native, dict):
            outcome = formats.translate(native, "unishard", from_="deepspeed")
            notes += [f"{item.key}: {item.note}" for item in outcome.items if item.fit in _TOLD]
            fields: dict[str, Any] = YAML(typ="safe").load(outcome.text)
            return fields
    except (ValueError, UnishardError) as error:
        notes.append(f"the config is not translated: {str(error).splitlines()[0]}")
        native = None
    notes.append(f"write the config: unishard translate {native or 'ds_config.json'} --to unishard -o train.yaml")
    return None
