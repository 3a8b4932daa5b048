"""Whether the batch sizes of a config agree with a number of ranks, and what to write if not.

Imports neither torch nor an engine.
"""

from __future__ import annotations

from unishard.config.describe import count_of
from unishard.config.training import Training
from unishard.errors import ConfigError, Problem

_PATH = "training.global_batch_size"


def check_batch(training: Training, world_size: int) -> int:
    """The global batch size on this number of ranks.

    Raises:
        ConfigError: The config sets another one. Proposes another number of accumulation steps first.
    """
    product = _of_a_rank(training) * world_size
    if training.global_batch_size in (None, product):
        return product
    message = (
        f"is {training.global_batch_size}, but micro_batch_size {training.micro_batch_size} x "
        "gradient_accumulation_steps "
        f"{training.gradient_accumulation_steps} x {count_of(world_size, 'rank')} is {product}"
    )
    raise ConfigError([Problem(_PATH, f"{message}; {_instead(training, training.global_batch_size, world_size)}")])


def ranks_of_batch(training: Training) -> int | None:
    """The number of ranks that gives the global batch size; None if the config sets none.

    Raises:
        ConfigError: No number of ranks gives it.
    """
    whole, share = training.global_batch_size, _of_a_rank(training)
    if whole is None:
        return None
    if whole % share == 0:
        return whole // share
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    message = (
        f"is {whole}, but each rank adds micro_batch_size {micro} x gradient_accumulation_steps {steps} = {share} "
        "samples"
    )
    if whole % micro:
        raise ConfigError(
            [Problem(_PATH, f"{message}; write a multiple of {share}, such as {_nearest(whole, share)}, or remove it")]
        )
    fewer = _largest_divisor(whole // micro, steps)
    instead = (
        f"write gradient_accumulation_steps: {fewer}, which gives it on {count_of(whole // (micro * fewer), 'rank')}"
    )
    raise ConfigError([Problem(_PATH, f"{message}; {instead}, or remove global_batch_size")])


def _instead(training: Training, whole: int, world_size: int) -> str:
    """What to write so that the three sizes agree: only the accumulation steps, if that is enough."""
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    if whole % (micro * world_size) == 0:
        return f"write gradient_accumulation_steps: {whole // (micro * world_size)}, or remove global_batch_size"
    if whole % world_size == 0:
        smaller = _largest_divisor(whole // world_size, micro)
        both = f"gradient_accumulation_steps: {whole // (world_size * smaller)} and micro_batch_size: {smaller}"
        return f"write {both}, or remove global_batch_size"
    nearest = _nearest(whole, micro * world_size)
    more = nearest // (micro * world_size)
    before = f"gradient_accumulation_steps: {more} and " if more != steps else ""
    return (
        f"{world_size} ranks do not divide {whole}: write {before}global_batch_size: {nearest}, or remove "
        "global_batch_size"
    )


def _of_a_rank(training: Training) -> int:
    return training.micro_batch_size * training.gradient_accumulation_steps


def _largest_divisor(number: int, most: int) -> int:
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)


def _nearest(number: int, unit: int) -> int:
    """The nearest multiple, at least one."""
    return max(1, round(number / unit)) * unit
