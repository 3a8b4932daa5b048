"""Builds the usual rows of a format's table of rules: for the training script, for no key, and for what tools around
torch share.
"""

from __future__ import annotations

from unishard.config import Config, LaunchSettings, Logging, Profile, leaves
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Holds, Rule, Setting, When

__all__ = [
    "BEFORE_EACH_FORWARD",
    "BUFFERS",
    "MATMUL",
    "NO_FILES",
    "NO_INVERSE_SQRT",
    "RESHARDS_TO_ALL",
    "endless",
    "keeps_more",
    "logged_by_script",
    "lost",
    "moved_together",
    "none",
    "saved_by_script",
    "started_elsewhere",
    "unless",
    "unlooked",
    "write",
]

_LOGGING = tuple(path for path, _ in leaves(Logging, "logging."))
_PROFILE = tuple(path for path, _ in leaves(Profile, "profile."))
_LAUNCH = LaunchSettings()
_WAITS = "affects only time: training waits until the files are written"
NO_FILES = "PyTorch has no offload to files; choose cpu, or backend deepspeed"


def unless(case: str, holds: Holds, note: str = "") -> When:
    """A case in which a config needs nothing, so that nothing can be lost."""
    return When(case, holds, Fit.EXACT, note)


def write(note: str, off: Holds | None = None, case: str = "", why: str = "") -> Rule:
    """A row for what the training script must do.

    Args:
        note: What to write there.
        off: Whether a config needs nothing.
        case: That condition in words.
        why: Why nothing is needed.
    """
    return Rule(Fit.NEEDS_INPUT, SCRIPT, note, when=(unless(case, off, why),) if off else ())


def none(note: str, off: Holds | None = None, case: str = "", fit: Fit = Fit.IGNORED) -> Rule:
    """A row for what the format has no key for.

    Args:
        note: Why nothing is lost, or what is.
        off: Whether a config asks for what happens anyway.
        case: That condition in words.
        fit: What is lost otherwise.
    """
    return Rule(fit, NO_KEY, note, when=(unless(case, off),) if off else ())


BEFORE_EACH_FORWARD = "DistributedDataParallel sends them before each forward"
BUFFERS = Rule(
    Fit.NEEDS_INPUT,
    SCRIPT,
    "broadcast BatchNorm's running statistics from rank 0 before evaluation and saving",
    when=(
        unless("local", lambda cfg: cfg.training.buffers == "local"),
        When(
            "sync",
            lambda cfg: cfg.training.buffers == "sync",
            Fit.IGNORED,
            "only for models with BatchNorm: average its running statistics before evaluation and saving",
        ),
    ),
)
"""The row of `training.buffers` where nothing is done about buffers after the start."""


RESHARDS_TO_ALL = When(
    "a number",
    lambda cfg: cfg.sharding.reshard_group is not None,
    Fit.EQUIVALENT,
    "only true or false there: backward gathers among all ranks; pass the number to fully_shard",
)
"""The case of `sharding.reshard_after_forward` where a tool takes no smaller group."""

MATMUL = write("call torch.set_float32_matmul_precision", lambda cfg: cfg.precision.matmul == "keep", "keep")
"""The row of `precision.matmul` where a tool has no key for it."""


def endless(cfg: Config) -> bool:
    """Whether the schedule has no end, so that the loop decides how long it runs."""
    return not cfg.scheduler.ends


NO_INVERSE_SQRT = When(
    "inverse_sqrt",
    lambda cfg: cfg.scheduler.name == "inverse_sqrt",
    Fit.UNSUPPORTED,
    "there is no such schedule; choose linear or cosine",
)
"""The case of `scheduler.name` where a tool has no inverse square root."""


def lost(why: str, off: Holds, case: str) -> Rule:
    """A row for what the format does not support, unless a config does not need it."""
    return none(why, off, case, Fit.UNSUPPORTED)


def moved_together(key: str, to: Setting, files: str = NO_FILES) -> dict[str, Rule]:
    """The rows of `offload.params` and `offload.optimizer` where one flag moves both to the host.

    Args:
        key: The flag.
        to: Writes it, if either is to lie there.
        files: Why nothing can lie in files.
    """
    other = {
        "params": f"{key} moves the optimizer's state as well, and its step to the host",
        "optimizer": f"{key} moves the parameters as well, which are copied to the device for each use",
    }
    return {f"offload.{what}": _moved(what, key, to, files, note) for what, note in other.items()}


def _moved(what: str, key: str, to: Setting, files: str, note: str) -> Rule:
    rest = "optimizer" if what == "params" else "params"
    return Rule(
        Fit.EXACT,
        key,
        "",
        to,
        (
            unless("none", lambda cfg: getattr(cfg.offload, what) == "none"),
            When("nvme", lambda cfg: getattr(cfg.offload, what) == "nvme", Fit.UNSUPPORTED, files),
            When(
                f"cpu without offload.{rest}: cpu",
                lambda cfg: getattr(cfg.offload, rest) != "cpu",
                Fit.APPROXIMATE,
                note,
            ),
        ),
    )


def keeps_more(cfg: Config) -> bool:
    """Whether a config keeps more checkpoints than the newest: where a tool cannot, all are kept."""
    return cfg.checkpoint.keep_every is not None or cfg.checkpoint.keep_best is not None


def saved_by_script(call: str) -> dict[str, Rule]:
    """The rows of `checkpoint` where the training script saves.

    Args:
        call: What it calls for that, such as `accelerator.save_state(...)`.
    """
    null = "null"
    return {
        "checkpoint.dir": write(f"the directory of {call}", lambda cfg: cfg.checkpoint.dir is None, null),
        "checkpoint.on_existing": write(
            f"look in that directory before {call} is called the first time",
            lambda cfg: cfg.checkpoint.on_existing == "error",
            "error",
        ),
        "checkpoint.every_steps": write(
            f"{call} whenever the number of updates is a multiple of it",
            lambda cfg: cfg.checkpoint.every_steps is None,
            null,
        ),
        "checkpoint.every_minutes": write(
            f"{call} by the clock of rank 0, broadcast to all ranks",
            lambda cfg: cfg.checkpoint.every_minutes is None,
            null,
        ),
        "checkpoint.keep_last": write("delete older checkpoints", lambda cfg: cfg.checkpoint.keep_last is None, null),
        "checkpoint.keep_every": write("spare these from it", lambda cfg: cfg.checkpoint.keep_every is None, null),
        "checkpoint.keep_best": write(
            "spare those with the best metric from it", lambda cfg: cfg.checkpoint.keep_best is None, null
        ),
        "checkpoint.best": write(
            "compare the metrics", lambda cfg: cfg.checkpoint.keep_best is None, "without keep_best"
        ),
        "checkpoint.async_save": none(_WAITS, lambda cfg: not cfg.checkpoint.async_save, "false"),
        "checkpoint.on_signal": write(
            f"a handler (signal.signal) that sets a flag, and {call} after the update",
            lambda cfg: not cfg.checkpoint.on_signal,
            "empty",
        ),
    }


def logged_by_script(what: str = "") -> dict[str, Rule]:
    """The rows of `logging` and `profile` where the training script logs: training is the same without.

    Args:
        what: What the tool itself has for it.
    """
    note = f"affects only logs{what and '; '}{what}"
    return {
        **{path: none(note, lambda cfg: not cfg.logging.to, "nothing is logged") for path in _LOGGING},
        **{
            path: none("traces only; use torch.profiler", lambda cfg: not cfg.profile.steps, "no steps")
            for path in _PROFILE
        },
    }


_TORCHRUN = {
    "nodes": "torchrun --nnodes",
    "processes_per_node": "torchrun --nproc-per-node",
    "endpoint": "torchrun --rdzv-endpoint",
    "rendezvous": "torchrun --rdzv-backend",
    "rendezvous_id": "torchrun --rdzv-id",
    "rendezvous_options": "torchrun --rdzv-conf",
    "max_restarts": "torchrun --max-restarts",
}
_JOB = "only unishard launch writes such a job; training is the same"
_AROUND = {"environment": "export them before the launch", "slurm": _JOB, "kubernetes": _JOB}


def started_elsewhere(**options: str) -> dict[str, Rule]:
    """The rows of `launch` where another launcher starts the ranks, whose command line says what no config does.

    Args:
        options: What says each setting, or why nothing does, where that is not an option of torchrun.
    """
    said = {name: f"pass {option}" for name, option in _TORCHRUN.items()} | _AROUND | options
    return {f"launch.{name}": _unlaunched(name, said[name]) for name in LaunchSettings.model_fields}


def _unlaunched(name: str, note: str) -> Rule:
    default = getattr(_LAUNCH, name)
    case = "null" if default is None else "empty" if default == {} else str(default)
    return none(note, lambda cfg: bool(getattr(cfg.launch, name) == default), case)


def unlooked(
    fit: Fit, key: str, note: str, *more: When, scaled: tuple[Fit, str] = (Fit.EXACT, "GradScaler does it")
) -> Rule:
    """The row of `training.nonfinite` where only torch's `GradScaler` looks at gradients, which only fp16 has.

    Args:
        fit: Without it.
        key: Where an update that is not finite can be stopped.
        note: How.
        more: Further cases.
        scaled: How well it does what `skip` asks.
    """
    return Rule(
        fit,
        key,
        note,
        when=(
            unless("ignore", lambda cfg: cfg.training.nonfinite == "ignore"),
            When(
                "skip in fp16",
                lambda cfg: cfg.training.nonfinite == "skip" and cfg.precision.compute == "fp16",
                *scaled,
            ),
            *more,
        ),
    )
