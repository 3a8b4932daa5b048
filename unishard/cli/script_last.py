"""Commands that start a script: `unishard COMMAND CFG [OPTIONS] SCRIPT ARGS`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class ScriptLast(TyperCommand):
    """Leaves what follows the script to the script, options included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `--` before the arguments of the script."""
        values = {name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts}
        words, positional, first = iter(range(len(args))), 0, ""
        for at in words:
            if args[at] == "--":
                break
            if args[at].startswith("-"):
                if args[at] in values:
                    next(words, None)
            else:
                positional += 1
                first = first or args[at]
                if positional == 2:
                    args = [*args[:at], "--", *args[at:]]
                    break
        if first.endswith(".py"):
            raise typer.BadParameter(f"{first} is the script; write the config before it: cfg.yaml {first}")
        return list(super().parse_args(ctx, args))
