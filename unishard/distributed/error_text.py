"""The text of an error as other ranks get it: short, in one piece, and there for every error. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from unishard.errors import shortened

LONGEST = 4000
"""Characters of an error's text that are sent or written."""


def text_of(error: BaseException) -> str:
    """The text of an error; its middle is left out if it is long."""
    try:
        text = str(error)
    except Exception as broken:  # of the user's class
        return f"no text, since its __str__ raises {type(broken).__name__}"
    return shortened(text, LONGEST)


def readable(error: BaseException) -> BaseException:
    """The error, or a copy of it that can be written: where its text, or that of one of its causes, is too long or
    raises, the copy has the same name and a shortened text.
    """
    chain = [error]
    while (inner := _behind(chain[-1])) is not None and inner not in chain:
        chain.append(inner)
    if all(_is_readable(inner_error) for one in chain for inner_error in (one, *errors_in(one))):
        return error
    shown: BaseException | None = None
    for inner_error in reversed(chain):
        kind = type(inner_error)
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        cause, shown = shown, type(kind.__name__, (Exception,), named)(text_of(inner_error))
        shown.__traceback__, shown.__cause__ = inner_error.__traceback__, cause
    assert shown is not None
    return shown


def _behind(error: BaseException) -> BaseException | None:
    """What an error was raised from; the first error of a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_readable(error: BaseException) -> bool:
    try:
        return len(str(error)) <= LONGEST
    except Exception:  # of the user's class
        return False


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """The error, or those in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from errors_in(member)
    else:
        yield error
