"""Load a `Config` from YAML or a mapping plus overrides; report all errors at once, with their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unishard.config import Config, Section
from unishard.config.describe import shown
from unishard.distributed import early
from unishard.errors import ConfigError, Problem
from unishard.loading.document import Document, from_file, from_mapping, section_of, without_own_sections
from unishard.loading.launched import handed_over
from unishard.loading.origins import Origin, Origins
from unishard.loading.other_tools import other_tool
from unishard.loading.overrides import override
from unishard.loading.renamed import current_change, current_names
from unishard.loading.validation import Finding, dotted, findings_of

__all__ = ["Origin", "Origins", "load", "read", "settle"]


def load(source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), *, section: str | None = None) -> Config:
    """Load a config from a YAML 1.2 file or a mapping. Top-level keys that start with `x-` are your own, and are not read.

    Args:
        source: Path of a YAML file, or its content as a mapping. None: the file that `unishard launch` was given, with its overrides.
        overrides: Overrides such as `["training.micro_batch_size=4", "sharding.units=[A, B]"]`. The value is YAML;
            the last one wins.
        section: Dotted name of the section that holds the config, in a file that has other sections too; None for the whole file.

    Returns:
        The validated config.

    Raises:
        ConfigError: The file cannot be read, or has invalid values; lists every problem with `file:line`. Or there is no source, and
            `unishard launch` has not started this process.
    """
    if source is None:
        source, given = handed_over()
        early.install()  # `unishard launch` has started this process
        overrides = [*given, *_changes(overrides)]
    return read(source, overrides, section=section)[0]


def read(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, section: str | None = None) -> tuple[Config, Origins]:
    """Load a config together with the origin of each value."""
    document = _open(source)
    return settle(document if section is None else section_of(document, section), overrides)


def settle(document: Document, overrides: Sequence[str]) -> tuple[Config, Origins]:
    """Validate a document with overrides.

    Raises:
        ConfigError: It has invalid values. Lists every problem.
    """
    document = without_own_sections(document)
    if what := other_tool(document.data):
        file = document.origins.of(()).source
        raise ConfigError([Problem("", f"{what} unishard translate {file or 'FILE'} --to unishard -o train.yaml", file)])
    document.data = current_names(document.data, document.origins)
    findings = list(document.findings)
    for text in map(current_change, _changes(overrides)):
        wrong = list(override(document, text))
        keys = tuple(text.partition("=")[0].strip().split("."))
        findings = [found for found in findings if wrong or not found.of_value or found.path[: len(keys)] != keys] + wrong
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
        return ConfigError([Problem(dotted(finding.path), finding.what) for finding in findings_of(error, data, section)])

    def override(self, cfg: Config, changes: Sequence[str]) -> Config:
        return settle(from_mapping(cfg.model_dump(exclude_unset=True)), changes)[0]


Section.reader = _InPython()


def _open(source: str | Path | Mapping[str, Any]) -> Document:
    if isinstance(source, Mapping):
        return from_mapping(source)
    if isinstance(source, str | Path):
        return from_file(Path(source))
    raise _argument(f"load expects the path of a YAML file or a mapping such as {{'backend': 'fsdp'}}, got {_kind(source)}")


def _changes(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str):
        raise _argument(f"overrides must be a list, got a string; write overrides=[{overrides!r}]")
    example = "write them as overrides=['training.seed=3']"
    if isinstance(overrides, Mapping) or not isinstance(overrides, Iterable):
        raise _argument(f"overrides must be a list, got {_kind(overrides)}; {example}")
    changes = list(overrides)
    for change in changes:
        if not isinstance(change, str):
            raise _argument(f"overrides contains {shown(change)} ({type(change).__name__}), which is not a string; {example}")
    return changes


def _argument(what: str) -> ConfigError:
    return ConfigError([Problem("", what)])


def _kind(value: object) -> str:
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"


def _error(findings: Sequence[Finding], origins: Origins) -> ConfigError:
    placed = [(finding.place or origins.of(finding.path), finding) for finding in findings]
    placed.sort(key=lambda pair: pair[0].order)
    return ConfigError([Problem(dotted(finding.path), finding.what, str(place)) for place, finding in placed])
