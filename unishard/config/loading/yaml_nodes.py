"""Build plain values from the nodes of a YAML file, and record the line of each."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from unishard.config.loading.document import Document
from unishard.config.loading.origins import Keys, Origin, file_error
from unishard.config.loading.validation import Finding
from unishard.config.loading.values import checked

_MOST_NODES = 200_000
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_TAG = "tag:yaml.org,2002:"
_TEXT = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value"}
_PLAIN = _TEXT | {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}


class YamlNodes:
    """The values of a YAML document's nodes.

    Args:
        yaml: Says what a number or a switch is.
        name: Of the file.
        document: Takes the lines of the values, and what no config may contain.
        foreign: Whether it is another tool's file.
    """

    def __init__(self, yaml: YAML, name: str, document: Document, foreign: bool) -> None:
        self._constructor = yaml.constructor
        self._name, self._document, self._foreign = name, document, foreign
        self._open: list[Node] = []
        self._built = 0

    def value_of(self, node: Node, keys: Keys) -> Any:
        """The plain value of a node.

        Raises:
            ConfigError: It comes to more values than any config has.
        """
        self._built += 1
        if self._built > _MOST_NODES:  # a few lines of aliases to aliases can mean billions of values
            raise file_error(
                self._name, f"contains more than {_MOST_NODES} values after expanding its aliases; name another file"
            )
        if any(node is other for other in self._open):
            return self._find(keys, "refers to itself; write the value", node)
        self._open.append(node)
        try:
            if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
                return self._mapping(node, keys)
            if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
                return [self.value_of(item, (*keys, index)) for index, item in enumerate(node.value)]
            if isinstance(node, ScalarNode):
                return self._scalar(node, keys)
            return self._tagged(node, keys)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, keys: Keys) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._find(keys, "has a key that is not a string; write 'field: value' lines", key_node)
            elif key_node.tag != f"{_TAG}merge":
                here = (*keys, key_node.value)
                if self._is_new(here, key_node, own, merged):
                    own[key_node.value] = self.value_of(value_node, here)
            elif self._foreign:
                merged |= self._merged(value_node, keys)
            else:
                message = "merge keys are not part of YAML 1.2; write out the fields"
                self._find((*keys, key_node.value), message, key_node)
        return merged | own

    def _is_new(self, here: Keys, node: ScalarNode, own: Container[str], merged: Container[str]) -> bool:
        """Record the line of a key; false for a duplicate, which does not count in a config of unishard."""
        origins, place = self._document.origins, self._place(node)
        if node.value in own:
            duplicate = Finding(here, f"is a duplicate of line {origins.of(here).line}; remove one of the two", place)
            if not self._foreign:
                self._document.findings.append(duplicate)
                return False
            self._document.repeats.append(duplicate)
        if node.value in own or node.value in merged:
            origins.put(here, place)
        else:
            origins.add(here, place)
        return True

    def _merged(self, node: Node, keys: Keys) -> dict[str, Any]:
        """The fields of a merge key; the first of several mappings wins."""
        parts = node.value if isinstance(node, SequenceNode) else [node]
        mappings = [self.value_of(part, keys) for part in reversed(parts)]
        return {key: value for part in mappings if isinstance(part, dict) for key, value in part.items()}

    def _scalar(self, node: ScalarNode, keys: Keys) -> Any:
        tag = str(node.tag)
        if tag not in _PLAIN:
            return self._tagged(node, keys)
        try:
            value = node.value if tag in _TEXT else self._constructor.construct_object(node)
        except (ValueError, ArithmeticError):
            return self._find(keys, f"cannot be read as a number: {node.value[:40]!r}; write digits", node)
        if not self._foreign:
            return checked(value, keys, self._document.findings, self._place(node))
        if isinstance(value, int) and _OCTAL.fullmatch(node.value):
            self._document.octal[keys] = value
            return int(node.value.replace("_", ""), 8)
        return value

    def _tagged(self, node: Node, keys: Keys) -> None:
        self._find(
            keys, f"has the YAML tag {str(node.tag).replace(_TAG, '!!'):.60}, which is not supported; remove it", node
        )

    def _find(self, keys: Keys, message: str, node: Node) -> None:
        self._document.findings.append(Finding(keys, message, self._place(node)))

    def _place(self, node: Node) -> Origin:
        return Origin(self._name, node.start_mark.line + 1)
