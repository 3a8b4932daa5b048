"""What a training script does: how it shards its model, and the parts of its loop."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import libcst as cst
from libcst import matchers as m

from unishard.config.sharding import Strategy
from unishard.errors import UnishardError

_WRAPS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "initialize", "prepare")
"""Calls that make a model distributed."""
CLIPS = ("clip_grad_norm_", "clip_grad_norm")

_QUOTIENT = m.AugAssign(operator=m.DivideAssign()) | m.Assign(value=m.BinaryOperation(operator=m.Divide()))


def code(node: cst.CSTNode) -> str:
    """The source of a part of a script."""
    return cst.Module([]).code_for_node(node)


def names_in(node: cst.CSTNode) -> set[str]:
    """The names that an expression reads; of `args.lr` it is `args`."""
    attributes = {id(each.attr) for each in m.findall(node, m.Attribute()) if isinstance(each, cst.Attribute)}
    return {code(each) for each in m.findall(node, m.Name()) if id(each) not in attributes}


def argument(call: cst.Call | None, name: str, index: int | None = None) -> cst.BaseExpression | None:
    """An argument by name or place."""
    for number, each in enumerate(call.args if call else ()):
        if each.keyword.value == name if each.keyword else number == index:
            return each.value
    return None


def target_of(line: cst.SimpleStatementLine) -> tuple[list[str], cst.BaseExpression | None]:
    """The names that a statement assigns to, and the value."""
    match line.body[0]:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Tuple(elements=elements))], value=value):
            return [code(each.value) for each in elements], value
        case cst.Assign(targets=[cst.AssignTarget(target=target)], value=value):
            return [code(target)], value
        case cst.Expr(value=value):
            return [], value
    return [], None


class ScriptFacts(cst.CSTVisitor):
    """Filled by visiting a script."""

    def __init__(self, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self._parents = parents
        self._aliases: dict[str, str] = {}
        self._calls: list[tuple[cst.SimpleStatementLine, list[str], cst.Call]] = []
        self._stepped: set[str] = set()
        # The call that makes the model distributed, its name, and what it is given; its result is the engine's name.
        self.wrap: cst.Call | None = None
        self.kind = self.model = self.engine = ""
        self.wraps: set[cst.CSTNode] = set()
        # The statement after which the engine can be prepared.
        self.anchor: cst.SimpleStatementLine | None = None
        self.bindings: dict[cst.CSTNode | None, set[str]] = defaultdict(set)
        self.accelerator = self.scaler = ""
        self.accelerate: cst.Call | None = None
        self.optimizers: list[str] = []
        self.schedulers: list[str] = []
        self.loaders: dict[str, cst.Call] = {}
        self.literals: dict[str, cst.BaseExpression] = {}
        # The innermost loops with a backward, the number of micro-batches of an update, what clips, what casts.
        self.loops: set[cst.For] = set()
        self.steps: str | None = None
        self.divided: set[str] = set()
        self.clip: cst.BaseExpression | None = None
        self.autocast: cst.Call | None = None

    def parent(self, node: cst.CSTNode | None, kind: type[cst.CSTNode]) -> cst.CSTNode | None:
        """The innermost node of a kind around another."""
        while node is not None and not isinstance(node := self._parents.get(node), kind):
            pass
        return node

    def called(self, node: cst.CSTNode | None) -> str:
        """The last name of the function that is called, as its module names it; empty for anything else."""
        last = code(node.func).rpartition(".")[2] if isinstance(node, cst.Call) else ""
        return self._aliases.get(last, last)

    def known(self, node: cst.CSTNode | None) -> set[str]:
        """The names of the function around a node, and of the module."""
        return self.bindings[self.parent(node, cst.FunctionDef)] | self.bindings[None]

    @property
    def trained(self) -> list[str]:
        """The loaders that the training loops read."""
        read = [name for loop in self.loops for name in names_in(loop.iter)]
        return [name for name in self.loaders if name in read] or list(self.loaders)[:1]

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:
        name = code(node.asname.name if node.asname else node.name)
        self._aliases[name] = code(node.name)
        self.bindings[self.parent(node, cst.FunctionDef)].add(name.partition(".")[0])

    def visit_Param(self, node: cst.Param) -> None:
        self.bindings[self.parent(node, cst.FunctionDef)].add(node.name.value)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        (names, value), scope = target_of(node), self.parent(node, cst.FunctionDef)
        self.bindings[scope] |= set(names)
        if len(names) == 1 and value is not None and scope is None:
            self.literals[names[0]] = value
        if isinstance(value, cst.Call):
            self._calls.append((node, names, value))

    def visit_Call(self, node: cst.Call) -> None:
        match self.called(node), self.parent(node, cst.For), self.parent(node, cst.If), node.func:
            case "backward", cst.For() as loop, _, _:
                self.loops.add(loop)
            case what, _, _, _ if what in CLIPS:
                self.clip = argument(node, "max_norm", 1)
            case "autocast", _, _, _:
                self.autocast = node
            case "step", _, test, cst.Attribute(value=of):
                self._stepped |= {code(of), *(code(each.value) for each in node.args)}
                rest = m.findall(test.test, m.BinaryOperation(operator=m.Modulo())) if isinstance(test, cst.If) else []
                self.steps = next((code(each.right) for each in rest), self.steps)  # type: ignore[attr-defined]

    def leave_Module(self, original_node: cst.Module) -> None:
        for line, names, call in self._calls:
            self._learn(line, names, call)
        for found in m.findall(original_node, _QUOTIENT):
            target, _, divisor = re.split(r"\s*(/?=)\s*", code(found), maxsplit=1)
            self.divided |= {target} if divisor.rpartition("/")[2].strip() == self.steps else set()

    def _learn(self, line: cst.SimpleStatementLine, names: list[str], call: cst.Call) -> None:
        what, name = self.called(call), names[0] if names else ""
        block = self.parent(line, cst.IndentedBlock)
        if what in _WRAPS and (what != "prepare" or code(call.func) == f"{self.accelerator}.prepare"):
            self._wrapped(line, names, call, what)
        elif what == "Accelerator":
            self.accelerator, self.accelerate = name, call
        elif what == "GradScaler":
            self.scaler = name
        elif what == "DataLoader":
            self.loaders[name] = call
        elif name in self._stepped and (self.anchor is None or block is self.parent(self.anchor, cst.IndentedBlock)):
            scheduled = names_in(call) & set(self.optimizers)
            (self.schedulers if scheduled else self.optimizers).append(name)
            self.anchor = line if self.anchor is not None and self.kind != "initialize" else self.anchor

    def _wrapped(self, line: cst.SimpleStatementLine, names: list[str], call: cst.Call, what: str) -> None:
        self.wraps.add(line)
        model, loop = argument(call, "module" if what.startswith("D") else "model", 0), self.parent(line, cst.For)
        if model is None or (isinstance(loop, cst.For) and code(model) in names_in(loop.target)):
            return  # a block of the model
        others = {*self.optimizers, *self.schedulers, *self.loaders}
        given = [code(each.value) for each in call.args] if what == "prepare" else [code(model)]
        self.kind, self.wrap, self.anchor = what, call, line
        self.model = next((each for each in given if each not in others), code(model))
        self.engine = next((each for each in names if each not in others), self.model)


# -- The config that takes the place of what a script says itself ----------------------------------

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
