"""Private names of an engine that a rare case needs, each with a probe that says whether the installed version still has them.

An ordinary run uses documented names only. A case that no documented name can serve is a `Patch`: it is installed only for runs that
can meet the case, and where its probe fails that case alone is refused. `unishard doctor` runs every probe. Imports no engine until a
probe runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any

from unishard.errors import BackendError

__all__ = ["Patch", "by_name", "version_of"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One case that needs private names of an engine."""

    name: str
    """Short name, such as `ddp-buckets`."""
    case: str
    """What a run does that needs it, as the start of a sentence: `DistributedDataParallel on more than two ranks`."""
    names: tuple[str, ...]
    """The private names, as `module:Class.attribute` or `module:function`; an attribute may be one that the class sets on itself."""
    versions: str
    """Versions on which the case was run."""
    link: str
    """The upstream source, issue or documentation that shows why it is needed."""
    instead: str
    """What to do where a name is gone, as an imperative."""

    @property
    def package(self) -> str:
        """Distribution that the names belong to."""
        return self.names[0].partition(":")[0].partition(".")[0]

    def missing(self) -> tuple[str, ...]:
        """The names that the installed version does not have. Imports the engine."""
        return tuple(name for name in self.names if not _exists(name))

    @property
    def works(self) -> bool:
        """Whether the installed version has every name. Imports the engine."""
        return not self.missing()

    def refusal(self) -> str:
        """Why the case cannot be run here, and what to do instead: one sentence."""
        absent = ", ".join(name.partition(":")[2] for name in self.missing())
        return (
            f"{self.case} needs {absent} of {self.package}, which {self.package} {version_of(self.package)} does not have "
            f"(it was run on {self.versions}); {self.instead}"
        )

    def require(self) -> None:
        """Check that the case can be run here.

        Raises:
            BackendError: A name is gone.
        """
        if not self.works:
            raise BackendError(self.refusal())


def by_name(*patches: Patch) -> Mapping[str, Patch]:
    """Patches by their short name, in the order given."""
    return {patch.name: patch for patch in patches}


def version_of(package: str) -> str:
    """Version of an installed distribution without its local label, `not installed` where there is none."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        if inspect.isclass(found) and not hasattr(found, part):
            return part in _assigned(found)  # an attribute of its instances ends the path
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@cache
def _assigned(owner: type) -> frozenset[str]:
    """Names that a class and its bases annotate, or use as attributes in their methods."""
    return frozenset(
        name
        for base in owner.__mro__
        for name in (*base.__dict__.get("__annotations__", ()), *(name for code in _codes(base) for name in code.co_names))
    )


def _codes(owner: type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(function, FunctionType):
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
