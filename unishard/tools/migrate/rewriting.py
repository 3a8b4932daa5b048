"""Rewrite a training script's own loop to the engine's."""

from __future__ import annotations

import re
from difflib import unified_diff
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider

from unishard.config.hints import METHODS, PACKAGE
from unishard.errors import UnishardError
from unishard.tools.migrate.facts import CLIPS, ScriptFacts, argument, code, config_of, target_of

_RENAMED = {"is_main_process": "is_main", "num_processes": "world_size", "process_index": "rank", "reduce": "mean"}
_SAME = dict.fromkeys(("backward", "device", "gather_for_metrics", "print")) | _RENAMED
"""What an accelerator has, and the engine's name where it is another."""
_OWN = {"module": "its parameters are sharded; engine.state_dict(), called on all ranks, has all weights"}
_EARLY = {"parameters", "named_parameters", "to", "cuda", "config"}
"""What a function that helps to build the model may call."""
_GONE = ("set_requires_gradient_sync", "set_is_last_backward", "zero_grad")
_UNWRAPPED = re.compile(r"no_sync|autocast|\.accumulate\(")
_MODULO = m.BinaryOperation(operator=m.Modulo())


class Rewriting(cst.CSTTransformer):
    """Uses what `ScriptFacts` has found; what it cannot tell becomes a comment."""

    def __init__(self, facts: ScriptFacts) -> None:
        super().__init__()
        self._facts = facts
        self._home = facts.parent(facts.anchor, cst.FunctionDef)
        self._configured = self._prepared = False

    # -- expressions

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = original_node.attr.value
        if code(original_node.value) == self._facts.accelerator and name in _SAME:
            return self._of_engine(_SAME[name] or name)
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        facts, func = self._facts, original_node.func
        if facts.accelerator and facts.called(original_node) == "DataLoader":
            return self._loader(original_node)
        if not isinstance(func, cst.Attribute):
            return updated_node
        of, what = code(func.value), func.attr.value
        match what, of == facts.accelerator:
            case "backward", True:
                return self._of_engine("backward", self._loss(original_node.args[0].value))
            case "backward", False if of != facts.engine and self._sees_engine(original_node):
                return self._of_engine("backward", self._loss(func.value))
            case "step", False if of in (*facts.optimizers, facts.scaler):
                return self._of_engine("step", "")
            case "destroy_process_group", _:
                return cst.parse_expression("unishard.shutdown()")
            case "wait_for_everyone", True:
                return cst.parse_expression("torch.distributed.barrier()")
            case "reduce", True:
                return updated_node.with_changes(args=[cst.Arg(original_node.args[0].value)])
            case "item", _ if of.startswith(f"{facts.accelerator}.reduce("):
                return cst.ensure_type(updated_node.func, cst.Attribute).value  # a number already
        return updated_node

    def _loss(self, loss: cst.BaseExpression) -> str:
        """The arguments of `engine.backward`: the loss before it is scaled, and before it is divided."""
        match loss:
            case cst.Call(func=func, args=[scaled]) if code(func) == f"{self._facts.scaler}.scale":
                return self._loss(scaled.value)
            case cst.BinaryOperation(left=left, operator=cst.Divide(), right=right) if code(right) == self._facts.steps:
                return code(left)
        return code(loss) + (", scaled=True" if code(loss) in self._facts.divided else "")

    def _loader(self, call: cst.Call) -> cst.BaseExpression:
        """`unishard.dataloader`, which shards, in place of a loader that Accelerate would shard."""
        shuffle = argument(call, "shuffle", 2)
        decided = ("dataset", "batch_size", "shuffle", "sampler")
        kept = [f"{each.keyword.value}={code(each.value)}" for each in call.args if each.keyword]
        kept = [each for each in kept if each.partition("=")[0] not in decided]
        data = code(argument(call, "dataset", 0) or call)
        words = [data, "cfg", f"shuffle={code(shuffle) if shuffle else False}", *kept]
        return cst.parse_expression(f"unishard.dataloader({', '.join(words)})")

    def _of_engine(self, name: str, arguments: str | None = None) -> cst.BaseExpression:
        called = "" if arguments is None else f"({arguments})"
        return cst.parse_expression(f"{self._facts.engine}.{name}{called}")

    def _sees_engine(self, node: cst.CSTNode) -> bool:
        return self._facts.engine in self._facts.known(node)

    # -- statements

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        facts, (names, value) = self._facts, target_of(original_node)
        kept = [_noted(updated_node, self._hints(original_node, original_node))]
        if original_node in facts.wraps:
            renamed = facts.kind.endswith("Parallel") and names and names[0] != facts.model
            kept = [_line(f"{names[0]} = {facts.model}")] if renamed else []
        elif facts.called(value) in CLIPS:
            kept = [_line(f"{names[0]} = {facts.engine}.grad_norm()")] if names else []
        elif facts.called(value) in ("Accelerator", "GradScaler") or self._is_gone(value):
            kept = []
        if facts.accelerator and names and names[0] in facts.loaders:
            kept = [*self._config(), *kept]
        if original_node is facts.anchor:
            self._prepared = True
            kept += [*self._config(), self._prepare(names)]
        return cst.FlattenSentinel(kept) if kept else cst.RemoveFromParent()

    def _is_gone(self, value: cst.CSTNode | None) -> bool:
        facts = self._facts
        match value:
            case cst.Call(func=cst.Attribute(value=of, attr=cst.Name(value=what))):
                stepped = code(of) in facts.schedulers
                return what in _GONE or (stepped if what == "step" else code(of) == facts.scaler)
        return False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Any:
        if not updated_node.body.body:  # the blocks that were sharded
            return cst.RemoveFromParent()
        if original_node not in self._facts.loops or not self._sees_engine(original_node):
            return updated_node
        if m.matches(original_node.iter, m.Call(func=m.Name("range"))):
            return _noted(updated_node, ["read the batches from engine.batches(loader): it ends the windows"])
        return updated_node.with_changes(iter=self._batches(updated_node.iter))

    def _batches(self, data: cst.BaseExpression) -> cst.BaseExpression:
        if isinstance(data, cst.Call) and self._facts.called(data) in ("enumerate", "tqdm"):
            return data.with_deep_changes(data.args[0], value=self._batches(data.args[0].value))
        return self._of_engine("batches", code(data))

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        alone = len(original_node.items) == 1 and _UNWRAPPED.search(code(original_node.items[0]))
        return _inlined(updated_node, updated_node.body.body) if alone else updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """At the end of a window, the step moves in front of the test, and the rest under what it returns."""
        engine, body = self._facts.engine, updated_node.body.body
        if not body and updated_node.orelse is None:
            return cst.RemoveFromParent()
        rest = [each for each in body if code(each).strip() != f"{engine}.step()"]
        if len(rest) == len(body) or not m.findall(original_node.test, _MODULO):
            return _noted(updated_node, self._hints(original_node, original_node.test))
        if updated_node.orelse is not None:
            return _noted(updated_node, [f"call {engine}.step() for every micro-batch; `updated` ends a window"])
        step = _line(f"step = {engine}.step()" if rest else f"{engine}.step()")
        lines = [_noted(step, ["the last window of an epoch may be short: training.last_window"])]
        if rest:
            source = "".join(map(code, rest)).replace(f"{engine}.grad_norm()", "step.grad_norm")
            block, test = cst.IndentedBlock(cst.parse_module(source).body), cst.parse_expression("step.updated")
            lines.append(updated_node.with_changes(test=test, body=block, leading_lines=[]))
        return _inlined(updated_node, lines)

    # -- what is added

    def _config(self) -> list[cst.SimpleStatementLine]:
        notes: list[str] = []
        line = [] if self._configured else [_noted(_line(config_of(self._facts, notes)), notes)]
        self._configured = True
        return line

    def _prepare(self, names: list[str]) -> Any:
        facts = self._facts
        optimizer, scheduler = (next(iter(each), "") for each in (facts.optimizers, facts.schedulers))
        notes = [] if len(facts.optimizers) == 1 else ["prepare takes one optimizer"]
        if facts.kind == "initialize":
            optimizer, scheduler = (_code(argument(facts.wrap, name)) for name in ("optimizer", "lr_scheduler"))
            notes = [f"{name} is {facts.engine}.optimizer now" for name in names[1:2] if name.strip("_")]
            notes += ["read training_data with unishard.dataloader"] if argument(facts.wrap, "training_data") else []
        elif scheduler:
            often = ", and Accelerate once for each rank" if facts.accelerator else ""
            notes.append(f"the engine steps {scheduler} once in an update{often}")
        words = [facts.model, "cfg", optimizer, scheduler if optimizer or not scheduler else f"scheduler={scheduler}"]
        return _noted(_line(f"{facts.engine} = unishard.prepare({', '.join(filter(None, words))})"), notes)

    def _hints(self, around: cst.CSTNode, node: cst.CSTNode) -> list[str]:
        """What to write in place of names that the engine does not have."""
        facts, here = self._facts, self._facts.parent(around, cst.FunctionDef)
        hints: dict[str, str | None] = {}
        for found in m.findall(node, m.Attribute(attr=m.Name())):
            of, _, name = code(found).rpartition(".")
            if name in ("init_process_group", "init_distributed"):
                hints[name] = PACKAGE[name]
            elif of == facts.engine and (self._prepared if here is self._home else name not in _EARLY):
                hints[name] = _OWN.get(name, METHODS.get(name))
            elif of == facts.accelerator and name not in (*_SAME, "wait_for_everyone", "accumulate"):
                hints[name] = METHODS.get(name, "the engine has nothing of this name")
        return [f"{name}: {hint}" for name, hint in hints.items() if hint]


def _code(node: cst.CSTNode | None) -> str:
    return code(node) if node is not None else ""


def _line(text: str) -> cst.SimpleStatementLine:
    return cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)


def _noted(node: Any, notes: list[str]) -> Any:
    comments = [cst.EmptyLine(comment=cst.Comment(f"# unishard: {note}")) for note in dict.fromkeys(notes)]
    return node.with_changes(leading_lines=[*node.leading_lines, *comments])


def _inlined(block: Any, lines: Any) -> Any:
    """The lines of a block in its place, with the comments above it."""
    first, *rest = lines
    lead = [*block.leading_lines, *first.leading_lines]
    return cst.FlattenSentinel([first.with_changes(leading_lines=lead), *rest])


# -- A script moved to unishard, and the diff that does it -----------------------------------------


def migrated(source: str, path: Path) -> str:
    """The script with unishard's loop.

    Args:
        source: The script.
        path: Its name, for messages.

    Raises:
        UnishardError: It is not Python, or no loop of DDP, FSDP, DeepSpeed or Accelerate is found in it.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        raise UnishardError(f"{path}:{error.raw_line}: is not Python; name a training script") from None
    facts = ScriptFacts(wrapper.resolve(ParentNodeProvider))
    wrapper.module.visit(facts)
    if facts.anchor is None or not facts.loops:
        what = "a training loop with backward" if facts.anchor is not None else "a call that shards the model"
        raise UnishardError(
            f"{path}: has no {what[2:]} of DistributedDataParallel, fully_shard, FullyShardedDataParallel, "
            "deepspeed.initialize or Accelerator.prepare; write the loop as in docs/index.md"
        )
    moved = wrapper.module.visit(Rewriting(facts))
    return _with_imports(moved, _names(wrapper.module) - _names(moved)).code


def diff_of(before: str, after: str, path: Path) -> str:
    """A unified diff, for `patch -p0` and `git apply -p0`."""
    return "".join(unified_diff(before.splitlines(True), after.splitlines(True), str(path), str(path)))


def _names(script: cst.Module) -> set[str]:
    """The names that are used, without imports."""
    body = [each for each in script.body if not m.matches(each, _IMPORT)]
    return {found.value for line in body for found in m.findall(line, m.Name()) if isinstance(found, cst.Name)}


_IMPORT = m.SimpleStatementLine(body=[m.Import() | m.ImportFrom(names=~m.ImportStar())])


def _with_imports(script: cst.Module, unused: set[str]) -> cst.Module:
    """Drop the imports of what is no longer used, and add ours."""
    lines: list[Any] = []
    last = 0
    for line in script.body:
        if m.matches(line, _IMPORT):
            part: Any = cst.ensure_type(line, cst.SimpleStatementLine).body[0]
            kept = [each for each in part.names if code((each.asname or each).name) not in unused]
            if not kept:
                continue
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            line = line.with_deep_changes(part, names=kept) if len(kept) < len(part.names) else line
            last = len(lines) + 1
        lines.append(line)
    return script.with_changes(body=[*lines[:last], cst.parse_statement("import unishard"), *lines[last:]])
