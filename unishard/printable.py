"""Text from files, made safe to print: a name in a checkpoint or a config may hold commands for a terminal."""

from __future__ import annotations

import re

__all__ = ["in_one_line", "printable", "shortened"]

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters of both sets except tab and line feed, what reverses or breaks lines, and what is no character."""
_CONTROL, _BREAK = re.compile(f"[{_CONTROLS}]"), re.compile(f"[\n\t{_CONTROLS}]")


def printable(text: str) -> str:
    """Write control characters as the escapes of JSON and YAML; lines stay lines."""
    return _CONTROL.sub(_escaped, text)


def in_one_line(text: str) -> str:
    """The same for a name, in which line feeds and tabs are escaped too: it can begin no line of its own."""
    return _BREAK.sub(_escaped, text)


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a text that has more characters: its end often says what to write instead."""
    side = longest // 2
    return text if len(text) <= longest else f"{text[:side]} ... ({len(text)} characters) ... {text[-side:]}"


def _escaped(found: re.Match[str]) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(found[0], f"\\u{ord(found[0]):04x}")
