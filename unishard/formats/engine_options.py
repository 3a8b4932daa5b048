"""What the options of `accelerate launch` say about the engine, as Accelerate's config would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unishard.config.loading import Origin, Origins
from unishard.config.nested import merge, nested
from unishard.formats.launch_line import LaunchLine
from unishard.formats.names import names
from unishard.formats.script_arguments import value_of_word
from unishard.formats.shell_words import Word
from unishard.formats.source import Source, find_named

__all__ = ["with_engine_options"]

_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
_FILE = "deepspeed_config_file"
_DEEPSPEED = names(
    "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
    f"zero3_save_16bit_model zero3_init_flag deepspeed_moe_layer_cls_names {_FILE}"
)


def _engine_options(line: LaunchLine) -> Iterator[tuple[str, Word]]:
    """Those that choose and configure the engine, by the dotted keys of Accelerate's config (1.15.0,
    commands/launch.py).
    """
    for option, word in line.options.items() if line.launcher == "accelerate" else ():
        if option in _KINDS:
            yield "distributed_type", word._replace(text=_KINDS[option])
        elif option in _DEEPSPEED:
            yield f"deepspeed_config.{option}", word
        elif option.startswith("fsdp_"):
            yield f"fsdp_config.{option}", word


def with_engine_options(line: LaunchLine, file: Source | None, script: str) -> Source | None:
    """The config of the launcher, in which these options count more than its file.

    Args:
        line: A launch line.
        file: The config that it names.
        script: Where the line stands.
    """
    said = dict(_engine_options(line))
    if not said:
        return file
    base = file or Source(script, {}, Origins(Origin(script)), folder=Path(script).parent)
    origins = base.origins.below(())
    for key, word in said.items():
        origins.put(tuple(key.split(".")), Origin(script, word.line or None))
    return base._replace(
        data=merge(base.data, nested({key: _value(key, word, script) for key, word in said.items()})), origins=origins
    )


def _value(key: str, word: Word, script: str) -> Any:
    found = find_named(word.text, Path(script).parent) if key.endswith(_FILE) else None
    return str(found.resolve()) if found else value_of_word(word.text)
