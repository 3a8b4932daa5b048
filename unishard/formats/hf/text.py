"""A document of a tool that reads YAML, as text."""

from __future__ import annotations

from io import StringIO

from ruamel.yaml import YAML

from unishard.config.nested import Native

__all__ = ["text_of"]


def text_of(document: Native) -> str:
    """YAML that YAML 1.1 readers, such as PyYAML, read alike."""
    yaml = YAML()
    yaml.version = (1, 1)
    yaml.width = 140
    yaml.representer.ignore_aliases = lambda data: True
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue().partition("---\n")[2]
