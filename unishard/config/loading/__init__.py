"""Load a `Config` from YAML or a mapping plus overrides; report all errors at once, with their lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unishard.config import Config, Section
from unishard.config.describe import shown
from unishard.config.loading.document import Document, from_file, from_mapping, section_of, without_own_sections
from unishard.config.loading.origins import Origin, Origins
from unishard.config.loading.overrides import override
from unishard.config.loading.renamed import current_change, current_names
from unishard.config.loading.validation import Finding, dotted, findings_of
from unishard.errors import ConfigError, Problem

__all__ = ["Origin", "Origins", "load", "merge_overrides", "read"]

# -- The config that `unishard launch` hands to the script: `unishard.load()` without a path -------

CONFIG = "UNISHARD_CONFIG"
"""The path of the config."""
OVERRIDES = "UNISHARD_OVERRIDES"
"""A JSON list of overrides; unset without any."""


def variables(path: str, overrides: Sequence[str]) -> dict[str, str]:
    """The environment variables that hand a config to a script."""
    return {CONFIG: path} | ({OVERRIDES: json.dumps(list(overrides))} if overrides else {})


def handed_over(environ: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """The path of the config and the overrides that `unishard launch` was given.

    Raises:
        ConfigError: Nothing was handed over, or the overrides cannot be read.
    """
    global _used
    given = _given(environ)
    _used = True
    return given


def _given(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    path = environ.get(CONFIG)
    if not path:
        what = (
            "load() without a path reads the config that `unishard launch` was given, but this script was started "
            "without it; start it with `unishard launch cfg.yaml train.py`, set the environment variable "
            f"{CONFIG}=cfg.yaml, or write unishard.load('cfg.yaml')"
        )
        raise ConfigError([Problem("", what)])
    text = environ.get(OVERRIDES) or "[]"
    try:
        overrides = json.loads(text)
    except ValueError:
        overrides = None
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        what = (
            f"the environment variable {OVERRIDES} is {text!r}, not a JSON list of overrides; unset it or write "
            '["training.seed=3"]'
        )
        raise ConfigError([Problem("", what)])
    return path, overrides


def unused(environ: Mapping[str, str] = os.environ) -> str:
    """What of the config that `unishard launch` was given this script has not read, in a sentence; empty if it has read
    it, or if nothing in it is about the training.
    """
    if _used or not environ.get(CONFIG):
        return ""
    try:
        path, overrides = _given(environ)
        sections = _open(path).data.keys() - {"launch"}
    except ConfigError:
        return ""  # whoever reads it is told
    changes = [each for each in overrides if not each.startswith("launch.")]
    if not changes and (not sections or os.path.realpath(path) in _read):
        return ""
    given = " and ".join([path, *(f"--set {change}" for change in changes)])
    return (
        f"`unishard launch` was given {given}, and this script trains without it; call unishard.load() without a path "
        "to train with it"
    )


_used = False
"""Whether the config that was handed over has been read."""
_read: set[str] = set()
"""Files of configs that were read by their own path."""


# --------------------------------------------------------------------------------------------------
# Configs of other tools that are given as one of unishard: said once, not for each of their keys.

_KEYS = {
    "DeepSpeed": "zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_clipping steps_per_print "
    "bf16 fp16",
    "Accelerate": "distributed_type compute_environment fsdp_config deepspeed_config num_processes num_machines "
    "mixed_precision",
    "transformers' TrainingArguments": (
        "output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs learning_rate max_steps "
        "fsdp deepspeed"
    ),
    "Lightning": "trainer fit accelerator devices max_epochs gradient_clip_val",
    "axolotl": "base_model sequence_len datasets micro_batch_size num_epochs",
    "torchtitan": "job model parallelism metrics lr_scheduler",
}
"""Top-level keys by tool; none is a field here. The formats themselves tell more (`unishard.formats.catalog`), in a
room above."""
_NOT_TRANSLATED = ("axolotl", "torchtitan")

_ENOUGH = 2
"""Keys of one tool; one may be a slip."""


def other_tool(data: Any, file: str = "") -> str:
    """Which tool a document is for, and what to do; empty for a config of unishard.

    Args:
        data: The content of the document.
        file: Where it stands, if it is in a file.
    """
    if not isinstance(data, Mapping) or "backend" in data:
        return ""
    found = {tool: [key for key in keys.split() if key in data] for tool, keys in _KEYS.items()}
    tool = max(found, key=lambda name: len(found[name]))
    if len(found[tool]) < _ENOUGH:
        return ""
    what = f"is a config of {tool} ({', '.join(found[tool][:3])}), not of unishard"
    if tool in _NOT_TRANSLATED:
        return f"{what}, and unishard does not translate it; run `unishard init`"
    return f"{what}; translate it: unishard translate {file or 'FILE'} --to unishard -o train.yaml"


def load(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), *, section: str | None = None
) -> Config:
    """What `unishard.load` returns, without a word to the other ranks."""
    if source is None:
        source, given = handed_over()
        overrides = [*given, *_changes(overrides)]
    return read(source, overrides, section=section)[0]


def read(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, section: str | None = None
) -> tuple[Config, Origins]:
    """Load a config together with the origin of each value."""
    document = _open(source)
    if isinstance(source, str | Path):
        _read.add(os.path.realpath(source))
    return merge_overrides(document if section is None else section_of(document, section), overrides)


def merge_overrides(document: Document, overrides: Sequence[str]) -> tuple[Config, Origins]:
    """Validate a document with overrides.

    Raises:
        ConfigError: It has invalid values. Lists every problem.
    """
    document = without_own_sections(document)
    file = document.origins.of(()).source
    if what := other_tool(document.data, file):
        raise ConfigError([Problem("", what, file)])
    document.data = current_names(document.data, document.origins)
    findings = list(document.findings)
    for text in map(current_change, _changes(overrides)):
        wrong = list(override(document, text))
        keys = tuple(text.partition("=")[0].strip().split("."))
        findings = [
            found for found in findings if wrong or not found.of_value or found.path[: len(keys)] != keys
        ] + wrong
    try:
        cfg = Config.parse(document.data)
    except ValidationError as error:
        broken = {finding.path[:depth] for finding in findings for depth in range(1, len(finding.path) + 1)}
        findings += [found for found in findings_of(error, document.data) if found.path not in broken]
        raise _error(findings, document.origins) from None
    if findings:
        raise _error(findings, document.origins)
    return cfg, document.origins


class _InPython:
    """See `unishard.config.section.Reader`."""

    def refusal(self, section: type[Section], error: ValidationError, data: Any) -> ConfigError:
        return ConfigError(
            [Problem(dotted(finding.path), finding.what) for finding in findings_of(error, data, section)]
        )

    def override(self, cfg: Config, changes: Sequence[str]) -> Config:
        return merge_overrides(from_mapping(cfg.model_dump(exclude_unset=True)), changes)[0]


Section.reader = _InPython()


def _open(source: str | Path | Mapping[str, Any]) -> Document:
    if isinstance(source, Mapping):
        return from_mapping(source)
    if isinstance(source, str | Path):
        return from_file(Path(source))
    raise _argument(
        f"load expects the path of a YAML file or a mapping such as {{'backend': 'fsdp'}}, got {_kind(source)}"
    )


def _changes(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str):
        raise _argument(f"overrides must be a list, got a string; write overrides=[{overrides!r}]")
    example = "write them as overrides=['training.seed=3']"
    if isinstance(overrides, Mapping) or not isinstance(overrides, Iterable):
        raise _argument(f"overrides must be a list, got {_kind(overrides)}; {example}")
    changes = list(overrides)
    for change in changes:
        if not isinstance(change, str):
            raise _argument(
                f"overrides contains {shown(change)} ({type(change).__name__}), which is not a string; {example}"
            )
    return changes


def _argument(what: str) -> ConfigError:
    return ConfigError([Problem("", what)])


def _kind(value: object) -> str:
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"


def _error(findings: Sequence[Finding], origins: Origins) -> ConfigError:
    placed = [(finding.place or origins.of(finding.path), finding) for finding in findings]
    placed.sort(key=lambda pair: pair[0].order)
    return ConfigError([Problem(dotted(finding.path), finding.what, str(place)) for place, finding in placed])
