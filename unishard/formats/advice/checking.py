"""Whether unishard can run what a translation wrote."""

from __future__ import annotations

from unishard.config.topology import Topology
from unishard.contract import registry, translate
from unishard.errors import ConfigError, Problem
from unishard.formats.translating import Outcome

_BATCH = frozenset({"training.micro_batch_size", "training.gradient_accumulation_steps", "training.global_batch_size"})


def check(outcome: Outcome, topology: Topology | None = None) -> None:
    """Make sure that a unishard file can be prepared; other formats are their tools' to check.

    What depends on the ranks is checked when their number is known, and batch sizes when all of them are decided.

    Args:
        outcome: What a translation came to.
        topology: The ranks; left out, those that the source speaks of.

    Raises:
        ConfigError: Its batch sizes contradict each other, its groups do not fit the ranks, or the engine refuses
            something.
    """
    if outcome.to != "unishard":
        return
    config, ranks = outcome.reading.config, topology or outcome.reading.topology
    if _BATCH & outcome.reading.undecided.keys():
        config = config.model_copy(update={"training": config.training.model_copy(update={"global_batch_size": None})})
    try:
        if ranks is None:
            registry.get(config.backend).translate(config, Topology()).check(strict=False)
        else:
            translate.translate(config, topology=ranks).check(strict=False)
    except ConfigError as error:
        raise ConfigError([_placed(problem, outcome) for problem in error.problems]) from None


def _placed(problem: Problem, outcome: Outcome) -> Problem:
    """The problem with the line of the key that decides the field."""
    reading = outcome.reading
    for entry in reading.entries:
        if not entry.assumed and problem.path in entry.effect.sayings:
            return Problem(problem.path, problem.what, str(reading.source.origins.of(entry.path)))
    return Problem(problem.path, problem.what, reading.source.name)
