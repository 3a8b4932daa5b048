"""What Accelerate makes of its file: the environment of its launcher, and the plugins that are built in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unishard.formats.verify.deepspeed import settings_of as deepspeed_settings
from unishard.formats.verify.settings import AUTO, KEPT, kept_after_forward

_OWN = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DYNAMO_")
_ANYWHERE = {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
"""What the plugin refuses without an accelerator, or another setting of which it wants."""
_WORDS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def settings_of(text: str, folder: Path | None, ranks: int) -> dict[str, Any]:
    """The settings with which Accelerate would train; what it leaves to the script is left out.

    Raises what Accelerate raises.
    """
    with TemporaryDirectory() as place, _inside(folder):
        path = Path(place) / "accelerate.yaml"
        path.write_text(text, encoding="utf-8")
        options = [] if re.search(r"\bnum_processes\b", text) else ["--num_processes", str(ranks)]
        with _launched(path, options) as environment:
            return _settings(environment, ranks)


def _settings(environment: dict[str, str], ranks: int) -> dict[str, Any]:
    from accelerate.utils.dataclasses import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    compute = {"precision.compute": _WORDS.get(precision, precision)}
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        plugin = DeepSpeedPlugin()
        if "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in environment:
            plugin.set_mixed_precision(precision)
        document = {**plugin.deepspeed_config, "steps_per_print": 10}
        settings = dict(deepspeed_settings(_without_none(document), ranks))
        if document.get("gradient_clipping") == AUTO:
            settings["training.gradient_clipping"] = 1.0
        if "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in environment:
            settings["training.micro_batch_size"] = AUTO
        return settings
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        groups = environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
        return compute | fsdp_settings(FullyShardedDataParallelPlugin(), replicated=groups != "1")
    return compute | {"sharding.strategy": "no_shard"}


def _without_none(value: Any) -> Any:
    """Accelerate says "none" for a path that it does not have."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if not (key == "nvme_path" and item == "none")}
    return value


@contextmanager
def _inside(folder: Path | None) -> Iterator[None]:
    """Accelerate looks for the files that a file names in the working directory."""
    before = Path.cwd()
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _launched(path: Path, options: Sequence[str]) -> Iterator[dict[str, str]]:
    """Inside, the environment is that of a process that `accelerate launch` started."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(_OWN)]:
        del os.environ[name]
    try:
        with redirect_stdout(StringIO()):
            variables = _environment(path, options) | _ANYWHERE
        os.environ.update(variables)
        yield variables
    finally:
        os.environ.clear()
        os.environ.update(before)


def _environment(path: Path, options: Sequence[str]) -> dict[str, str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    arguments = launch_command_parser().parse_args(["--config_file", str(path), *options, "train.py"])
    arguments, defaults, formatted = _validate_launch_command(arguments)
    arguments.main_process_port = arguments.main_process_port or 0
    free, launch.is_port_in_use = launch.is_port_in_use, lambda port=None: False
    try:
        if not arguments.use_deepspeed:
            made = launch.prepare_multi_gpu_env(arguments)
            return {name: str(value) for name, value in made.items()}
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if formatted else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return {name: str(value) for name, value in launch.prepare_deepspeed_cmd_env(arguments)[1].items()}
    finally:
        launch.is_port_in_use = free


_OLD = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": KEPT,
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": f"hybrid_{KEPT}",
    "HYBRID_SHARD_ZERO2": f"hybrid_{KEPT}",
}


def fsdp_settings(plugin: Any, *, replicated: bool = False) -> dict[str, Any]:
    """The settings of a `FullyShardedDataParallelPlugin`.

    Args:
        plugin: The plugin.
        replicated: Whether a mesh of two axes makes groups of ranks.
    """
    if plugin.fsdp_version == 2:
        strategy = kept_after_forward(
            "hybrid_shard" if replicated else "full_shard", reshards=bool(plugin.reshard_after_forward)
        )
    else:
        strategy = _OLD.get(getattr(plugin.sharding_strategy, "name", ""), str(plugin.sharding_strategy))
    offload = plugin.cpu_offload
    on_host = (
        offload is True or getattr(offload, "offload_params", False) or type(offload).__name__ == "CPUOffloadPolicy"
    )
    place = "cpu" if on_host else "none"
    return {
        "sharding.strategy": strategy,
        "sharding.units": _units(plugin),
        "offload.params": place,
        "offload.optimizer": place,
        "activation_checkpointing": "full" if plugin.activation_checkpointing else "none",
    }


def _units(plugin: Any) -> Any:
    policy = getattr(plugin.auto_wrap_policy, "__name__", "")
    if "transformer" in policy:
        names = plugin.transformer_cls_names_to_wrap
        return sorted(names) if names else "auto"
    if "size" in policy:
        return "auto"
    return "none"
