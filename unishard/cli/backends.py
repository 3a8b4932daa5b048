"""`unishard backends`: list installed backends and what is missing."""

from __future__ import annotations

import sys

from unishard.cli.tables import show


def backends() -> None:
    """List the installed backends.

    Shows the package of each, whether its engine can be imported, and how to install it if not.

    Example: unishard backends
    """
    from unishard.contract import registry

    rows = []
    for name, point in registry.available().items():
        source = f"{point.dist.name} {point.dist.version}" if point.dist else "this checkout"
        try:
            install = registry.missing(registry.get(name))
        except ImportError as error:
            rows.append((name, source, f"import error: {error}", ""))
            continue
        rows.append((name, source, "missing" if install else "ready", install or ""))
    show(("backend", "package", "engine", "to install"), rows, sys.stdout)
