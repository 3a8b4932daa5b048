"""Renames an attribute inside an installed package, as its next release might."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from unishard.contract import private_api

__all__ = ["renamed"]

_ASKED = {"getattr", "hasattr", "setattr", "delattr"}
"""A string in a function that calls one of these may be the name of an attribute."""
_NEW = "_of_the_next_release"


@contextmanager
def renamed(package: str, attribute: str) -> Iterator[int]:
    """Within the block, every loaded module of a package calls an attribute by another name.

    Its functions (code, nested code, and strings that are the name, as for `hasattr`), classes (methods, class
    attributes, annotations, slots) and modules (globals) are changed alike, so that the package itself works as before.
    Modules that are imported within the block are not changed: import what the test needs before. Instances that were
    made before keep the old name, and so do submodules, which can be imported by the new one too.

    Args:
        package: Name of a package or module, such as `torch.distributed.fsdp`; all that lies in it is changed.
        attribute: Of an object, a class or a module. One that other objects have too, such as `partition` of a `str`,
            needs a package that does not use those.

    Yields:
        How many functions, classes and modules were changed: 0 where the package has no such attribute.
    """
    new = attribute + _NEW
    with ExitStack() as stack:
        stack.callback(_forget)
        modules = _modules(package)
        functions, classes = _found(package.partition(".")[0], len(sys.modules))
        within = [
            function for function in functions.get(attribute, ()) if _within(function.__globals__["__name__"], package)
        ]
        changes = [_in_function(function, attribute, new, stack) for function in within]
        changes += [
            _in_class(owner, attribute, new, stack)
            for owner in classes.get(attribute, ())
            if _within(owner.__module__, package)
        ]
        changes += [_in_module(module, attribute, new, stack) for module in modules]
        for name in [name for name in sys.modules if _within(name, package) and name.endswith(f".{attribute}")]:
            alias = name.removesuffix(attribute) + new
            sys.modules[alias] = sys.modules[name]
            stack.callback(sys.modules.pop, alias)
        _forget()
        yield sum(changes)


def _forget() -> None:
    """Let the probes look again."""
    private_api._absent.cache_clear()
    private_api._assigned.cache_clear()


def _within(name: Any, package: str) -> bool:
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


@cache
def _found(package: str, modules: int) -> tuple[dict[str, list[FunctionType]], dict[str, list[type]]]:
    """Functions by the names in their code, wherever they are kept (in classes, under decorators, in closures), and
    classes by theirs.

    The names are those before any renaming: an import may happen within a block.

    Args:
        package: That they belong to.
        modules: How many are loaded: looked for once, until there are more.
    """
    gc.unfreeze()  # what a fork server has frozen is not listed
    objects = gc.get_objects()
    gc.freeze()  # and makes each collection slow if it stays thawed
    functions: dict[str, list[FunctionType]] = {}
    classes: dict[str, list[type]] = {}
    for each in objects:
        if issubclass(type(each), type):  # `isinstance` would ask deprecated objects for their __class__
            for name in (
                {*vars(each), *vars(each).get("__annotations__", ())} if _within(each.__module__, package) else ()
            ):
                classes.setdefault(name.removesuffix(_NEW), []).append(each)
        elif type(each) is FunctionType and _within(each.__globals__.get("__name__"), package):
            for name in _names(each.__code__):
                functions.setdefault(name.removesuffix(_NEW), []).append(each)
    return functions, classes


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}.union(*nested)


def _modules(package: str) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if _within(name, package) and isinstance(module, ModuleType)
    ]


def _in_function(function: FunctionType, old: str, new: str, stack: ExitStack) -> bool:
    before, after = function.__code__, _in_code(function.__code__, old, new)
    if after is before:
        return False
    function.__code__ = after
    stack.callback(setattr, function, "__code__", before)
    return True


def _in_code(code: CodeType, old: str, new: str) -> CodeType:
    asked = code.co_name == "__getattr__" or _ASKED.intersection(code.co_names)
    constants = tuple(
        _in_code(constant, old, new)
        if isinstance(constant, CodeType)
        else new
        if asked and constant == old
        else constant
        for constant in code.co_consts
    )
    names = tuple(new if name == old else name for name in code.co_names)
    if names == code.co_names and all(after is before for after, before in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_names=names, co_consts=constants)


def _in_class(owner: type, old: str, new: str, stack: ExitStack) -> bool:
    annotations = vars(owner).get("__annotations__", {})
    if old in annotations:
        annotations[new] = annotations.pop(old)
        stack.callback(lambda: annotations.update({old: annotations.pop(new)}))
    if old in vars(owner):
        _move(owner, old, new)
        stack.callback(_move, owner, new, old)
        return True
    return new in annotations


def _move(owner: Any, old: str, new: str) -> None:
    value = vars(owner)[old]  # a static method or a descriptor as it is
    delattr(owner, old)
    setattr(owner, new, value)


def _in_module(module: ModuleType, old: str, new: str, stack: ExitStack) -> bool:
    if old not in vars(module) or isinstance(vars(module)[old], ModuleType):
        return False
    _move(module, old, new)
    stack.callback(_move, module, new, old)
    return True
