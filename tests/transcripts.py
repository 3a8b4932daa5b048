"""Commands with what they print, as pages show them."""

from __future__ import annotations

import re

EXIT = re.compile(r"# exits with (\d+)$")


def commands(text: str, language: str) -> list[tuple[str, list[str]]]:
    """Each command, over several lines where they end in a backslash, and the output shown below it; bash blocks show
    none."""
    start = "" if language == "bash" else r"\$ "
    several = re.compile(rf"^{start}(?:.*\\\n)+.*", re.MULTILINE)
    lines = several.sub(lambda found: re.sub(r"\\\n\s*", "", found[0]), text).splitlines()
    if language == "bash":
        return [(line.strip(), []) for line in lines if line.strip()]
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:].strip(), []))
        else:
            found[-1][1].append(line)
    return found


def shows(printed: str, shown: list[str]) -> bool:
    """Whether the lines shown are the lines printed, whatever the width of columns.

    A line `...` stands for any lines, and `...` in a line for any text.
    """
    lines = [" ".join(line.split()) for line in shown]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n" for line in lines
    )
    return (
        re.fullmatch(pattern, "".join(" ".join(line.split()) + "\n" for line in printed.rstrip().splitlines()))
        is not None
    )
