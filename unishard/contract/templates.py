"""Placeholders in files that something else fills in: `${VAR}` and `$VAR` of a shell, `${a.b}` and `???` of OmegaConf,
`{{ x }}` of Jinja. One may hold others: `${X:-${Y}}`, `${eval:${a} // ${b}}`.
"""

from __future__ import annotations

import re
from typing import Any

_PLACEHOLDER = re.compile(r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\{\{[^{}]*\}\}|(?<![\w$])\$[A-Z_][A-Z0-9_]*|^\?\?\?$")


_WORD = re.compile(r"[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)*")
_VALUES = ("AUTO", "NONE", "NULL", "TRUE", "FALSE", "INFINITY")
_SHORTEST = 4


def is_template_word(value: Any) -> bool:
    """Whether text in the place of a number or a switch is a word such as `GBSIZE`, which a script replaces (sed)."""
    return (
        isinstance(value, str)
        and len(value) >= _SHORTEST
        and _WORD.fullmatch(value) is not None
        and value not in _VALUES
    )


def placeholders_in(value: Any) -> tuple[str, ...]:
    """The placeholders in a value, such as `${OUT}` in `${OUT}/checkpoints`."""
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(value))) if isinstance(value, str) else ()


def is_placeholder(value: Any) -> bool:
    """Whether a value is only a placeholder."""
    return isinstance(value, str) and _PLACEHOLDER.fullmatch(value.strip()) is not None
