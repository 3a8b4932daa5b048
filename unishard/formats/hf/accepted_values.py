"""What values TrainingArguments take for arguments that are repeated as they are (transformers 5.23, training_args.py,
__post_init__).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Unreadable
from unishard.contract.key_rows import integer
from unishard.formats.names import names

Accepts = Callable[[Any], Any]


def _or_null(accepts: Accepts) -> Accepts:
    return lambda value: None if value is None else accepts(value)


def _word(*words: str) -> Accepts:
    """One of these, in lower case; YAML reads a bare `no` as false, which transformers refuses."""

    def accepts(value: Any) -> None:
        if not isinstance(value, str) or value not in words:
            raise Unreadable(
                f"must be one of {', '.join(words)}, got {shown(value)}; write one of them in quotes", value
            )

    return accepts


def _number(value: Any) -> None:
    if not isinstance(value, int | float):
        raise Unreadable(f"must be a number, got {shown(value)}; write one without quotes", value)
    if value > 1:
        integer()(value)


def _string(value: Any) -> None:
    if not isinstance(value, str):
        raise Unreadable(f"must be text, got {shown(value)}; write some, in quotes", value)


def _mapping(value: Any) -> None:
    if not isinstance(value, Mapping | str):
        raise Unreadable(f"must be a mapping or the path of a JSON file, got {shown(value)}; write one of them", value)


VALUES: Mapping[str, Accepts] = {
    "output_dir": _or_null(_string),
    "metric_for_best_model": _or_null(_string),
    "eval_strategy": _word("no", "steps", "epoch"),
    "save_strategy": _word("no", "steps", "epoch", "best"),
    "hub_strategy": _word("end", "every_save", "checkpoint", "all_checkpoints"),
    "save_steps": _number,
    **dict.fromkeys(names("eval_steps max_steps warmup_steps warmup_ratio"), _or_null(_number)),
    "dataloader_num_workers": integer(0),
    "dataloader_prefetch_factor": _or_null(integer(1)),
    "torch_empty_cache_steps": _or_null(integer(1)),
    "ddp_backend": _or_null(_word("nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl", "xccl")),
    "accelerator_config": _or_null(_mapping),
}
"""By argument; transformers does not look at the value of any other that is repeated."""
