"""Reads a unishard file entry by entry, and writes one with comments where a decision is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from unishard.config import Config, Section, leaves, value_at
from unishard.config.loading.document import from_mapping, without_own_sections
from unishard.config.loading.placeholders import needs, placeholder, stand_ins, undecided_in
from unishard.config.loading.renamed import current_names
from unishard.config.loading.validation import dotted, findings_of
from unishard.config.nested import Native, flat, merge, nested
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import Fit
from unishard.contract.templates import placeholders_in
from unishard.errors import ConfigError, Problem
from unishard.formats.files.documents import inline_yaml, yaml_text
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.launch.processes import Launch
from unishard.formats.markers import Coverage
from unishard.formats.reading.document import ReadDocument, assemble, default_of
from unishard.version import __version__

_LEAVES = [path for path, _ in leaves(Config)]
_ASKED_WITH = {"scheduler.total_steps": "scheduler.name"}
"""Fields without which the schema refuses some values of another one: open where that one is."""


class UnishardFormat(Format):
    """unishard's own YAML."""

    name = "unishard"
    tool = f"unishard {__version__}"

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """Every leaf is decided: by the file, or by the schema's default.

        Raises:
            ConfigError: The file has mistakes, or an override cannot be used.
        """
        if source.repeats:
            raise ConfigError(source.repeats)
        octal = {
            key: value
            for key, value in source.octal.items()
            if _value_in(source.data, tuple(key.split("."))) is not None
        }
        data = merge(dict(source.data), nested(octal))
        source = source._replace(data=current_names(data, source.origins))
        undecided = dict(_placeholders(source.data))
        config = _checked(source, undecided)
        written = list(_written(source.data, config, undecided))
        reading = assemble(
            self.name, source, [*written, *_defaults(config, written)], overrides=overrides, topology=topology
        )
        return reading if topology else reading._replace(topology=_launched(reading.config))

    def coverage(self, source: Source) -> Coverage:
        """How many of the sections are the config's, or the user's own."""
        unknown = tuple(key for key in source.data if key not in Config.model_fields and not key.startswith("x-"))
        return Coverage(1 - len(unknown) / max(len(source.data), 1), unknown)

    def stays_in_place(self, source: Source) -> bool:
        """Not short forms such as `offload: cpu`: each field is written."""
        return False

    def launch(self, reading: ReadDocument) -> Launch:
        """What the section `launch` says."""
        launch = reading.config.launch
        if not launch.changed:
            return Launch()
        host, _, port = (launch.endpoint or "").rpartition(":")
        return Launch(
            launch.nodes,
            launch.processes_per_node,
            address=(host or launch.endpoint) if launch.endpoint else None,
            port=(port if host else None) if launch.endpoint else None,
            rendezvous=None if launch.rendezvous == "static" else launch.rendezvous,
            devices=launch.environment.get("CUDA_VISIBLE_DEVICES"),
            max_restarts=launch.max_restarts,
        )

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The fields that the source decides, in the order of the schema, and what the chosen engine makes of each."""
        config = reading.config
        rules = registry.get(config.backend).rules
        words = {}
        for path, rule in rules.items():
            fit, note = rule.outcome(path, config)
            words[path] = FieldResult.held(path, fit=fit, note=note)
        for path, _ in leaves(Config):
            if placeholders := placeholders_in(str(value_at(config, path))):
                note = (
                    f"holds {' and '.join(placeholders)}, which unishard does not fill in; write the value, or add "
                    f"--set {path}=..."
                )
                words[path] = FieldResult.held(path, fit=Fit.NEEDS_INPUT, note=note)
        for path in reading.undecided:
            words[path] = FieldResult.held(path, fit=Fit.NEEDS_INPUT, note=f"write it, or add --set {path}=...")
        return RenderedDocument(_document(reading), words)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML, with a comment at each value that needs a decision."""
        return text_of(document, reading)


FORMAT = UnishardFormat()


def _value_in(document: Any, path: Path) -> Any:
    """What stands at a path; None where nothing does."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _launched(cfg: Config) -> Topology | None:
    """The ranks that `launch` starts; None where it leaves them open."""
    per_node = cfg.launch.processes_per_node
    return None if per_node is None else Topology(cfg.launch.max_nodes * per_node, per_node)


def _placeholders(data: Mapping[str, Any]) -> Iterator[tuple[str, Undecided]]:
    for path, value in flat(data):
        if undecided_in(value) == path:
            yield path, Undecided("your training script")


def _checked(source: Source, undecided: Mapping[str, Undecided]) -> Config:
    """The config, with stand-ins where the file has placeholders and other fields need a value."""
    known = {path: value for path, value in flat(source.data) if path not in undecided}
    config, problems = _validated(source, undecided, stand_ins(known, undecided))
    if config is None and any(problem.path in undecided for problem in problems):
        config, problems = _validated(source, undecided, {})
    if config is None:
        raise ConfigError(problems)
    return config


def _validated(
    source: Source, undecided: Collection[str], stand_ins: Mapping[str, Any]
) -> tuple[Config | None, list[Problem]]:
    document = without_own_sections(from_mapping(_filled(source.data, undecided, stand_ins)))
    findings = document.findings
    config = None
    try:
        config = Config.parse(document.data)
    except ValidationError as error:
        findings += findings_of(error, document.data)
    return None if findings else config, [
        Problem(dotted(one.path), one.what, str(source.origins.of(one.path))) for one in findings
    ]


def _filled(
    data: Mapping[str, Any], undecided: Collection[str], stand_ins: Mapping[str, Any], prefix: str = ""
) -> Native:
    filled = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        if path not in undecided:
            filled[name] = _filled(value, undecided, stand_ins, f"{path}.") if isinstance(value, Mapping) else value
        elif path in stand_ins:
            filled[name] = stand_ins[path]
    return filled


def _written(
    data: Mapping[str, Any], config: Config, undecided: Mapping[str, Undecided], above: Path = ()
) -> Iterator[Entry]:
    """One entry for each value of the file, and one for each field that a short form such as `offload: cpu` stands
    for.
    """
    for name, value in data.items():
        path = (*above, name)
        key = ".".join(path)
        if key.startswith("x-"):
            yield Entry(path, value, KeyEffect(Fit.IGNORED, "is a section of your own", beyond_fields=True))
        elif key == "native":
            yield from _native(value)
        elif key in undecided:
            yield Entry(path, value, KeyEffect(Fit.NEEDS_INPUT, "", {key: undecided[key]}))
        elif key in _LEAVES:
            yield Entry(path, value, KeyEffect(fields={key: value_at(config, key)}))
        elif isinstance(value, Mapping) and value:
            yield from _written(value, config, undecided, path)
        elif isinstance(value, Mapping):
            yield Entry(path, value, KeyEffect(Fit.IGNORED, "is empty"))
        else:
            for field in type(value_at(config, key)).shorthand:
                leaf = f"{key}.{field}"
                yield Entry((*path, field), value_at(config, leaf), KeyEffect(fields={leaf: value_at(config, leaf)}))


def _native(data: Any) -> Iterator[Entry]:
    if not data:
        yield Entry(("native",), data, KeyEffect(Fit.IGNORED, "is empty"))
    for backend, settings in data.items():
        if not settings:
            yield Entry(("native", backend), settings, KeyEffect(Fit.IGNORED, "is empty"))
        for path, value in _settings(settings):
            note = f"only {backend} has this setting, so another engine trains without it"
            key = ".".join((backend, *path))
            yield Entry(("native", backend, *path), value, KeyEffect(Fit.APPROXIMATE, note, native={key: value}))


def _settings(settings: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each setting; a mapping with a dot in a key is one value, since dots stand between the keys of a setting."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value and not any("." in key for key in value):
            yield from _settings(value, (*above, name))
        else:
            yield (*above, name), value


def _defaults(config: Config, written: Iterable[Entry]) -> Iterator[Entry]:
    fields = {field for entry in written for field in entry.effect.fields} | {"native"}
    for path in _LEAVES:
        if path not in fields:
            yield Entry(
                tuple(path.split(".")),
                value_at(config, path),
                KeyEffect(fields={path: value_at(config, path)}),
                assumed=True,
            )


def _document(reading: ReadDocument) -> Native:
    """The engine, and what the source decides; a field that is only assumed and equals the schema's default is left
    out.
    """
    assumed = {field for entry in reading.entries if entry.assumed for field in entry.effect.fields}
    values = {path: value_at(reading.config, path) for path, _ in leaves(Config)}
    asked = {path for path, switch in _ASKED_WITH.items() if switch in reading.undecided} - reading.decided
    document: Native = {"backend": reading.config.backend}
    for path, value in values.items():
        if path in reading.undecided or path in asked:
            document = merge(document, nested({path: placeholder(path)}))
        elif path in reading.decided and not (path in assumed and value == default_of(path, values)):
            document = merge(document, nested({path: plain(value)}))
        elif path == "native" and value:
            document["native"] = value
    return document


def value_text(value: Any) -> str:
    """A value as it stands behind a key on one line."""
    return inline_yaml(plain(value))


_SCRIPTS = ("training.micro_batch_size", "optimizer.name", "optimizer.lr", "scheduler.name")
"""What tools leave to the training script when their config does not say it."""


def text_of(document: Native, reading: ReadDocument) -> str:
    """YAML of the document, with a comment wherever a decision is needed, and a header that names what was left to the
    script.
    """
    commented = _commented(document)
    for path, comment in _comments(document, reading.undecided):
        *above, name = path.split(".")
        section: Any = commented
        for key in above:
            section = section[key]
        section.yaml_add_eol_comment(comment, name)
    return _header(reading) + yaml_text(commented)


def _comments(document: Native, undecided: Mapping[str, Undecided]) -> Iterator[tuple[str, str]]:
    """What is to be known of a line: who decides it, or that it counts only under one value of an open line."""
    for path, one in undecided.items():
        yield path, f"needs your decision: the value comes from {one.who}"
    for path, value in flat(document):
        for need in needs(path, value) if path not in undecided else ():
            for switch, accepted in need.items():
                if switch in undecided:
                    yield path, f"only with {switch} {' or '.join(accepted)}; remove it otherwise"


def plain(value: Any) -> Any:
    """A value as YAML holds it."""
    match value:
        case Section():
            return value.model_dump(exclude_unset=True)
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def _header(reading: ReadDocument) -> str:
    left = [path for path in _SCRIPTS if path not in reading.decided]
    if reading.format == "unishard" or not left:
        return ""
    return (
        f"# Not said by the {reading.format} config, since the training script decides it there: {', '.join(left)}.\n"
        "# Write them here, or hand the optimizer to unishard.prepare; otherwise the defaults hold.\n"
    )


def _commented(value: Any, depth: int = 0) -> Any:
    if isinstance(value, dict):
        return CommentedMap({key: _commented(item, depth + 1) for key, item in value.items()})
    if isinstance(value, list):
        items = CommentedSeq([_commented(item, depth + 1) for item in value])
        items.fa.set_flow_style()
        return items
    return value
