"""Makes the usual rows of a format's table of expressions: for the training script, for no key, and for what tools around torch share."""

from __future__ import annotations

from unishard.mapping.entries import NO_KEY, SCRIPT, Case, Expression, Holds, Setting, Verdict

__all__ = ["NO_FILES", "idle", "lost", "moved_together", "none", "saved_by_script", "unlooked", "write"]

_WAITS = "time alone: the training waits until the files are written"
NO_FILES = "PyTorch has no offload to files; choose cpu, or backend deepspeed"


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


def moved_together(key: str, to: Setting, files: str = NO_FILES) -> dict[str, Expression]:
    """The rows of `offload.params` and `offload.optimizer` where one flag moves both to the host.

    Args:
        key: The flag.
        to: Writes it, if either is to lie there.
        files: Why nothing can lie in files.
    """
    return {
        "offload.params": Expression(
            Verdict.EXACT,
            key,
            "",
            to,
            (
                idle("none", lambda cfg: cfg.offload.params == "none"),
                Case("nvme", lambda cfg: cfg.offload.params == "nvme", Verdict.REFUSED, files),
                Case(
                    "cpu without offload.optimizer: cpu",
                    lambda cfg: cfg.offload.optimizer != "cpu",
                    Verdict.APPROXIMATE,
                    f"{key} moves the optimizer's state as well, and its step to the host",
                ),
            ),
        ),
        "offload.optimizer": Expression(
            Verdict.EXACT,
            key,
            "",
            to,
            (
                idle("none", lambda cfg: cfg.offload.optimizer == "none"),
                Case("nvme", lambda cfg: cfg.offload.optimizer == "nvme", Verdict.REFUSED, files),
                Case(
                    "cpu without offload.params: cpu",
                    lambda cfg: cfg.offload.params != "cpu",
                    Verdict.APPROXIMATE,
                    f"{key} moves the parameters as well, which are copied to the device for each use",
                ),
            ),
        ),
    }


def saved_by_script(call: str) -> dict[str, Expression]:
    """The rows of `checkpoint` where the training script saves.

    Args:
        call: What it calls for that, such as `accelerator.save_state(...)`.
    """
    null = "null"
    return {
        "checkpoint.dir": write(f"the directory of {call}", lambda cfg: cfg.checkpoint.dir is None, null),
        "checkpoint.every_steps": write(
            f"{call} whenever the number of updates is a multiple of it", lambda cfg: cfg.checkpoint.every_steps is None, null
        ),
        "checkpoint.every_minutes": write(
            f"{call} by the clock of rank 0, broadcast to all ranks", lambda cfg: cfg.checkpoint.every_minutes is None, null
        ),
        "checkpoint.keep_last": write("delete older checkpoints", lambda cfg: cfg.checkpoint.keep_last is None, null),
        "checkpoint.keep_every": write("spare these from it", lambda cfg: cfg.checkpoint.keep_every is None, null),
        "checkpoint.async_save": none(_WAITS, lambda cfg: not cfg.checkpoint.async_save, "false"),
        "checkpoint.on_signal": write(
            f"a handler (signal.signal) that sets a flag, and {call} after the update", lambda cfg: not cfg.checkpoint.on_signal, "empty"
        ),
    }


def unlooked(
    verdict: Verdict, key: str, note: str, *more: Case, scaled: tuple[Verdict, str] = (Verdict.EXACT, "GradScaler does it")
) -> Expression:
    """The row of `training.nonfinite` where only torch's `GradScaler` looks at gradients, which fp16 alone has.

    Args:
        verdict: Without it.
        key: Where an update that is not finite can be stopped.
        note: How.
        more: Further cases.
        scaled: How well it does what `skip` asks.
    """
    return Expression(
        verdict,
        key,
        note,
        when=(
            idle("ignore", lambda cfg: cfg.training.nonfinite == "ignore"),
            Case("skip in fp16", lambda cfg: cfg.training.nonfinite == "skip" and cfg.precision.compute == "fp16", *scaled),
            *more,
        ),
    )
