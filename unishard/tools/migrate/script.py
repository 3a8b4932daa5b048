"""A script moved to unishard, and the diff that does it."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider

from unishard.errors import UnishardError
from unishard.tools.migrate.facts import ScriptFacts, code
from unishard.tools.migrate.rewriting import Rewriting


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
