"""What values DeepSpeed 0.19.8 takes.

It refuses a value of another type even where nothing reads the key (runtime/zero/config.py, offload_config.py,
runtime/precision_config.py, monitor/config.py, comm/config.py, compile/config.py: pydantic's models; runtime/config.py:
plain mappings).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unishard.config.describe import shown
from unishard.contract.entries import Unreadable
from unishard.contract.key_rows import boolean, integer, number, one_of, text
from unishard.contract.render import AUTO

Takes = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


class Values(NamedTuple):
    """The values of one key."""

    types: tuple[type, ...] = (object,)
    """JSON types that `native.deepspeed` takes."""
    convert: Takes = _as_it_is
    """The value from what people write for it, such as `1e8` for a whole number."""
    takes: Takes | None = None
    """Raises `Unreadable` for a value that DeepSpeed refuses; None where it does not look."""

    def wrong(self, value: Any) -> str:
        """What is wrong with a value under `native.deepspeed`; empty if nothing is."""
        # True is an int in Python, but not in JSON.
        if not isinstance(value, self.types) or (isinstance(value, bool) and not {bool, object} & {*self.types}):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in self.types)
            return f"must be {names}, got {type(value).__name__}; write a value of that type"
        try:
            if self.takes:
                self.takes(value)
        except Unreadable as error:
            return str(error)
        return ""


def _or_auto(takes: Takes) -> Takes:
    """Also `"auto"`: DeepSpeed's models leave such a key out (runtime/config_utils.py, DeepSpeedConfigModel)."""
    return lambda value: None if isinstance(value, str) and value == AUTO else takes(value)


def _or_null(takes: Takes) -> Takes:
    return lambda value: None if value is None else takes(value)


def _digits(low: float) -> Takes:
    def takes(value: Any) -> None:
        whole = integer(low)(value)
        if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
            raise Unreadable(f"must be a whole number in digits, got {shown(value)}; write {whole}", value)

    return takes


def _string(value: Any) -> None:
    if not isinstance(value, str):
        raise Unreadable(f"must be a string, got {shown(value)}; write one", value)


def _list(value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise Unreadable(f"must be a list, got {shown(value)}; write [...]", value)


def _list_of_names(value: Any) -> None:
    _list(value)
    for name in value:
        _string(name)


def _names(value: Any) -> None:
    if not isinstance(value, str):
        _list_of_names(value)


def _mapping(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping of keys, got {shown(value)}; write its keys below it, or remove it", value)


def count(low: float = -math.inf) -> Values:
    """Whole numbers from `low` on, in one of DeepSpeed's models."""
    return Values((int,), integer(), _or_auto(_digits(low)))


def number_from(low: float, high: float = math.inf) -> Values:
    """Numbers in these bounds, in one of DeepSpeed's models."""
    return Values((int, float), number(), _or_auto(number(low, high)))


def _keys(names: str, takes: Takes) -> dict[str, Takes]:
    return dict.fromkeys(names.split(), takes)


def _mapping_of(rows: Mapping[str, Takes], *, strict: bool = True) -> Takes:
    """A mapping that is one value.

    Args:
        rows: What its keys take.
        strict: Whether DeepSpeed refuses a key that it does not know.
    """

    def takes(value: Any) -> None:
        _mapping(value)
        for name, item in value.items():
            if name not in rows and strict:
                raise Unreadable(f"must have no key {shown(name)}, which DeepSpeed 0.19.8 does not know; remove it")
            try:
                if name in rows:
                    rows[name](item)
            except Unreadable as error:
                raise Unreadable(f"{error} ({name})", error.value) from None

    return takes


dtype = one_of(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    }
)
"""Reads the names of a dtype that DeepSpeed knows (DeepSpeed 0.19.8, runtime/config.py, DtypeEnum)."""

ANY = Values()
"""Whatever it is: a field decides the key, or a row of its own reads it."""


# Keys whose value DeepSpeed uses without a check.
FLAG = Values((bool,), boolean)
COUNT = Values((int,), integer())
COUNT_OR_NULL = Values((int, type(None)), integer())
FACTOR = Values((int, float), number())
LEVEL = Values((str,), text)

_switch, _whole = _or_auto(boolean), _or_auto(_digits(-math.inf))
_text = _or_null(_string)
SWITCH = Values((bool,), boolean, _switch)
SWITCH_OR_NULL = Values(takes=_or_null(_switch))
FRACTION = number_from(0, 1)
DEVICE = Values(takes=_or_auto(one_of(dict.fromkeys(("none", "cpu", "nvme")))))
PATH = Values(takes=_or_null(_or_auto(_string)))
LEAVES = Values(takes=_or_auto(_names))
MODULES = Values(takes=_names)
FP32_BUFFERS = Values((list, str), takes=_or_auto(_list_of_names))
AUTOCAST = Values(takes=dtype)
REDUCTION = Values(takes=_or_null(one_of(dict.fromkeys(("fp32", "fp16", "bf16")))))

MAPPING = Values((dict,), takes=_mapping)
MONITOR = Values(
    (dict,), takes=_or_auto(_mapping_of({"enabled": _switch, "output_path": _string, "job_name": _string}))
)
WANDB = Values(
    (dict,), takes=_or_auto(_mapping_of({"enabled": _switch, "group": _text, "team": _text, "project": _string}))
)
COMET = Values(
    (dict,),
    takes=_or_auto(
        _mapping_of(
            {
                "enabled": _switch,
                "samples_log_interval": _whole,
                **_keys("project workspace api_key experiment_name experiment_key mode", _text),
                "online": _or_null(_switch),
            }
        )
    ),
)
COMMS = Values((dict,), takes=_mapping_of({**_keys("enabled prof_all verbose debug", _switch), "prof_ops": _list}))
TIMERS = Values(
    (dict,), takes=_mapping_of({"throughput": _mapping_of(_keys("enabled synchronized", _switch))}, strict=False)
)
TAG = Values(takes=_mapping_of({"tag_validation": one_of(dict.fromkeys(("ignore", "warn", "fail")))}, strict=False))
HYBRID = Values(
    takes=_mapping_of(
        {
            **_keys("enabled release_inference_cache pin_parameters enable_cuda_graph", _switch),
            **_keys("inference_tp_size tp_gather_partition_size", _whole),
            "max_out_tokens": _or_auto(_digits(1)),
        }
    )
)
COMPILE: Mapping[str, Takes] = {
    **_keys(
        "deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory "
        "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
        "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors",
        _switch,
    ),
    "free_activation_threshold": _whole,
    "passes": _or_null(_list),
}
"""What the keys of the section `compile` take."""
COMPILED = Values(takes=_mapping_of(COMPILE))


CHECKPOINTS = "only affects checkpoints"
FILES = "belongs to DeepSpeed's own offload to files, in whose place unishard keeps files itself; remove it"
SWAPS = "how DeepSpeed moves files, which unishard keeps itself; affects only time"
OWN_CHECKPOINTS = "only affects DeepSpeed's own checkpoints; remove it"
