"""Edit fields in the text of a unishard file; keep comments, order, quotes and blank lines.

ruamel.yaml gives the position of each value; only the changed ones are rewritten. The result is parsed again and
compared with the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from unishard.config import Config, Section, leaves
from unishard.config.loading import merge_overrides
from unishard.config.loading.document import from_file, from_text, text_of
from unishard.config.loading.overrides import section_in
from unishard.config.loading.placeholders import stand_ins, undecided_in
from unishard.config.loading.renamed import current_change
from unishard.config.loading.validation import dotted
from unishard.config.nested import flat
from unishard.errors import ConfigError, Problem

_FIELDS = dict(leaves(Config))


class _Splice(NamedTuple):
    """A range of the text and its replacement."""

    start: int
    end: int
    text: str


def edit(path: Path, changes: Sequence[str]) -> str:
    """Apply changes to the text of a unishard file.

    Args:
        path: A YAML file.
        changes: Such as `sharding.strategy=full_shard`; the value is YAML.

    Raises:
        ConfigError: The file or a change has errors, which are all listed, or the file cannot be edited in place.
    """
    from_file(path)  # first refuse what is not a mapping
    changes = [current_change(change) for change in changes]
    whole = text_of(path)
    text = whole.replace("\r\n", "\n")
    wanted = check_text(text, str(path), changes)
    for change in changes:
        field, _, value = change.partition("=")
        text = _with(text, field.strip().split("."), _inline(value.strip()))
    if _meaning(text, str(path)) != wanted:
        raise ConfigError([Problem("", "cannot be edited in place; edit it by hand", str(path))])
    return text.replace("\n", "\r\n") if "\r\n" in whole else text


def check_text(text: str, name: str, changes: Sequence[str] = ()) -> Config:
    """Validate a unishard file that may contain placeholders such as `${optimizer.lr}`.

    Raises:
        ConfigError: The file or an override has errors.
    """
    document = from_text(text, name)
    changed = {change.partition("=")[0].strip() for change in changes}
    left = {
        path
        for path, value in flat(document.data)
        if undecided_in(value) == path and path in _FIELDS and path not in changed
    }
    for path in left:
        _leave_out(document.data, path.split("."))
    document.findings = [found for found in document.findings if dotted(found.path) not in left]
    temporary = stand_ins(dict(flat(document.data)), left)
    return merge_overrides(document, [*changes, *(f"{path}={value}" for path, value in temporary.items())])[0]


def _leave_out(data: Any, keys: Sequence[str]) -> None:
    for name in keys[:-1]:
        data = data[name]
    del data[keys[-1]]


def _meaning(text: str, name: str) -> Config | None:
    try:
        return check_text(text, name)
    except ConfigError:
        return None


def _inline(value: str) -> str:
    """Write a value on one line."""
    node = YAML().compose(value)
    if "\n" in value or (isinstance(node, MappingNode) and not node.flow_style):
        return json.dumps(from_text(value, "override").data, ensure_ascii=False)
    return value


def _with(text: str, keys: Sequence[str], value: str) -> str:
    """Change one field in the text."""
    for splice in sorted(_splices(text, keys, value), reverse=True):
        text = text[: splice.start] + splice.text + text[splice.end :]
    return text


def _splices(text: str, keys: Sequence[str], value: str) -> Iterator[_Splice]:
    node: MappingNode = YAML().compose(text)
    step = _step(node)
    kind: type[Section] | None = Config
    for depth, name in enumerate(keys, start=1):
        old = [old for old, new in kind.renamed.items() if new == name] if kind is not None else []
        pair = next((pair for pair in node.value if pair[0].value in (name, *old)), None)
        if pair is None:
            yield _added(text, node, kind, keys[depth - 1 :], value, step)
            return
        key, inner = pair
        if key.value != name:
            yield _Splice(key.start_mark.index, key.end_mark.index, name)
        kind = section_in(kind, name)
        if depth == len(keys):
            yield _replaced(text, key, inner, value)
        elif not isinstance(inner, MappingNode):
            yield from _expanded(text, _Short(node, key, inner, kind), keys[depth:], value, step)
            return
        node = inner


def _step(root: Node) -> int:
    """The file's indentation step."""
    inner = [
        value for _, value in root.value if isinstance(value, MappingNode) and not value.flow_style and value.value
    ]
    return inner[0].start_mark.column if inner else 2


def _flows(node: Node) -> bool:
    """Whether it is a scalar or in flow style."""
    return isinstance(node, ScalarNode) or bool(getattr(node, "flow_style", False))


def _end(node: Node) -> int:
    """The end of a node, without the comments and blank lines after it."""
    if _flows(node) or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _colon(text: str, key: Node) -> int:
    return text.index(":", key.end_mark.index) + 1


class _Short(NamedTuple):
    """A plain value in place of a section."""

    above: MappingNode
    key: Node
    node: Node
    kind: type[Section] | None


def _replaced(text: str, key: Node, node: Node, value: str) -> _Splice:
    if _is_empty(node) or not _flows(node):
        return _Splice(_colon(text, key), _value_end(text, key, node), f" {value}")
    return _Splice(node.start_mark.index, _end(node), value)


def _is_empty(node: Node) -> bool:
    """Whether the value is empty, which means null."""
    return bool(node.start_mark.index == node.end_mark.index)


def _value_end(text: str, key: Node, node: Node) -> int:
    """The end of a value; ruamel.yaml places an empty value before the next key."""
    return _colon(text, key) if _is_empty(node) else _end(node)


def _expanded(text: str, short: _Short, keys: Sequence[str], value: str, step: int) -> Iterator[_Splice]:
    """Set a field below a shorthand: `sharding: full_shard` becomes a section if necessary."""
    key, node = short.key, short.node
    names = short.kind.shorthand if short.kind is not None else ()
    if list(names) == list(keys):
        yield _replaced(text, key, node, value)
        return
    bare = text[node.start_mark.index : node.end_mark.index]
    fields = dict.fromkeys(names, bare) if bare not in ("", "null", "~") else {}
    fields[keys[0]] = _nested_flow(keys[1:], value)
    if short.above.flow_style:
        begin, end = (_colon(text, key),) * 2 if _is_empty(node) else (node.start_mark.index, node.end_mark.index)
        yield _Splice(
            begin, end, f"{' ' * _is_empty(node)}{{{', '.join(f'{name}: {said}' for name, said in fields.items())}}}"
        )
        return
    indent = " " * (key.start_mark.column + step)
    end = _value_end(text, key, node)
    yield _Splice(_colon(text, key), end, "")
    end = _line_end(text, end)
    yield _Splice(end, end, "".join(f"\n{indent}{name}: {said}" for name, said in fields.items()))


def _nested_flow(keys: Sequence[str], value: str) -> str:
    for name in reversed(keys):
        value = f"{{{name}: {value}}}"
    return value


def _added(
    text: str, node: MappingNode, kind: type[Section] | None, keys: Sequence[str], value: str, step: int
) -> _Splice:
    """Add a field after the fields that precede it in the schema."""
    if node.flow_style:
        said = f"{keys[0]}: {_nested_flow(keys[1:], value)}"
        at = _end(node.value[-1][1]) if node.value else node.start_mark.index + 1
        return _Splice(at, at, f", {said}" if node.value else said)
    column = node.value[0][0].start_mark.column
    lines = [f"{' ' * (column + step * depth)}{name}:" for depth, name in enumerate(keys)]
    said = "\n".join(lines) + f" {value}"
    before = _before(node, kind, keys[0])
    if before is None:
        at = node.value[0][0].start_mark.index - column
        return _Splice(at, at, f"{said}\n")
    at = _line_end(text, _end(before))
    apart = column == 0 and len(keys) > 1 and text[at:].startswith("\n\n")
    return _Splice(at, at, f"\n\n{said}" if apart else f"\n{said}")


def _before(node: MappingNode, kind: type[Section] | None, name: str) -> Node | None:
    """The value after which to insert a new field; None to insert it first."""
    order: list[str] = list(kind.model_fields) if kind is not None else []
    if name not in order:
        order = [*(key.value for key, _ in node.value), name]
    ranked: list[tuple[int, Node]] = [
        (order.index(key.value), value) for key, value in node.value if key.value in order
    ]
    earlier = [pair for pair in ranked if pair[0] < order.index(name)]
    return max(earlier, key=lambda pair: pair[0])[1] if earlier else None
