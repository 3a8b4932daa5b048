"""Makes the usual rows of a format's table of expressions: what the training script must do, and what has no key at all."""

from __future__ import annotations

from unishard.meanings import NO_KEY, SCRIPT, Case, Expression, Holds, Verdict

__all__ = ["idle", "lost", "none", "write"]


def idle(case: str, holds: Holds, note: str = "") -> Case:
    """A case in which a config needs nothing, so that nothing can be lost."""
    return Case(case, holds, Verdict.EXACT, note)


def write(note: str, off: Holds | None = None, case: str = "", why: str = "") -> Expression:
    """A row for what the training script must do.

    Args:
        note: What to write there.
        off: Whether a config needs nothing.
        case: That condition in words.
        why: Why nothing is needed.
    """
    return Expression(Verdict.UNDECIDED, SCRIPT, note, when=(idle(case, off, why),) if off else ())


def none(note: str, off: Holds | None = None, case: str = "", verdict: Verdict = Verdict.DROPPED) -> Expression:
    """A row for what the format has no key for.

    Args:
        note: Why nothing is lost, or what is.
        off: Whether a config asks for what happens anyway.
        case: That condition in words.
        verdict: What is lost otherwise.
    """
    return Expression(verdict, NO_KEY, note, when=(idle(case, off),) if off else ())


def lost(why: str, off: Holds, case: str) -> Expression:
    """A row for what cannot be had, unless a config does without it."""
    return none(why, off, case, Verdict.REFUSED)
