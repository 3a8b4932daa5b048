"""Load a `Config` from YAML or a mapping plus overrides; report all errors at once, with their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unishard.config import Config, Section
from unishard.config.describe import shown
from unishard.config.loading.document import Document, from_mapping, section_of, without_own_sections
from unishard.config.loading.launched import handed_over, note_read
from unishard.config.loading.origins import Origin, Origins
from unishard.config.loading.other_tools import other_tool
from unishard.config.loading.overrides import override
from unishard.config.loading.renamed import current_change, current_names
from unishard.config.loading.unused_fields import without_unused
from unishard.config.loading.validation import Finding, dotted, findings_of
from unishard.config.loading.yaml_file import from_file
from unishard.errors import ConfigError, Problem

__all__ = ["Origin", "Origins", "load", "merge_overrides", "read"]


def load(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), *, section: str | None = None
) -> Config:
    """What `unishard.load` returns, without a word to the other ranks."""
    if source is None:
        source, changes = handed_over()
        overrides = [*changes, *_changes(overrides)]
    return read(source, overrides, section=section)[0]


def read(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, section: str | None = None
) -> tuple[Config, Origins]:
    """Load a config together with the origin of each value."""
    document = _open(source)
    if isinstance(source, str | Path):
        note_read(source)
    return merge_overrides(document if section is None else section_of(document, section), overrides)


def merge_overrides(document: Document, overrides: Sequence[str]) -> tuple[Config, Origins]:
    """Validate a document with overrides.

    Raises:
        ConfigError: It has invalid values. Lists every problem.
    """
    document = without_own_sections(document)
    file = document.origins.of(()).source
    if message := other_tool(document.data, file):
        raise ConfigError([Problem("", message, file)])
    document.data = current_names(document.data, document.origins)
    findings, changes = list(document.findings), [current_change(change) for change in _changes(overrides)]
    before = deepcopy(document.data) if changes else None
    for text in changes:
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
        changed = {change.partition("=")[0].strip() for change in changes}
        if changed and (config := without_unused(document, before, findings, changed)):
            return config, document.origins
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


def _argument(message: str) -> ConfigError:
    return ConfigError([Problem("", message)])


def _kind(value: object) -> str:
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"


def _error(findings: Sequence[Finding], origins: Origins) -> ConfigError:
    placed = [(finding.place or origins.of(finding.path), finding) for finding in findings]
    placed.sort(key=lambda pair: pair[0].order)
    return ConfigError([Problem(dotted(finding.path), finding.what, str(place)) for place, finding in placed])
