"""The site that `make site` builds: every page is in it once, and so is every public name."""

from __future__ import annotations

import html
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import markdown
import pytest
from ruamel.yaml import YAML

import unishard
from unishard.config import Config, Section, items_of
from unishard.testing import conformance

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = YAML(typ="safe").load(ROOT / "mkdocs.yml")
API = {
    page: re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for page in sorted((DOCS / "api").glob("*.md"))
}
NAMES = [name for names in API.values() for name in names]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(nav: Any) -> Iterator[str]:
    """The pages of the navigation, in its order."""
    match nav:
        case str():
            yield nav
        case dict():
            yield from (page for each in nav.values() for page in entries(each))
        case _:
            yield from (page for each in nav for page in entries(each))


def test_every_page_is_in_the_navigation_once(hooks: ModuleType) -> None:
    pages = {path for path in DOCS.rglob("*.md") if not path.match(SITE["not_in_nav"].strip())}
    names = {str(path.relative_to(DOCS)) for path in pages} | set(hooks.OUTSIDE.values())
    assert sorted(entries(SITE["nav"])) == sorted(names)


def test_a_newcomer_sees_what_unishard_is_and_then_four_tabs() -> None:
    titles = [title for group in SITE["nav"] for title in group]
    assert titles == ["What unishard is", "Train", "Run", "Evidence", "Develop"]


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    assert sorted(name.removeprefix("unishard.") for name in NAMES if name.count(".") == 1) == sorted(unishard.__all__)
    assert len(NAMES) == len(set(NAMES))


def test_every_section_of_the_config_is_on_a_page_of_the_api() -> None:
    named = {f"unishard.config.{section.__name__}" for section in sections(Config)}
    assert named == {name for name in NAMES if name.startswith("unishard.config.")}


def sections(kind: type[Section]) -> Iterator[type[Section]]:
    for field in kind.model_fields.values():
        below = items_of(field.annotation) or field.annotation
        if isinstance(below, type) and issubclass(below, Section):
            yield below
            yield from sections(below)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_of_the_api_names_is_there(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


def test_what_is_listed_of_the_conformance_suite_is_there() -> None:
    ((members,),) = (
        re.findall(r"members: \[(.*)\]", page.read_text(encoding="utf-8")) for page in API if page.stem == "testing"
    )
    assert [name for name in members.split(", ") if name not in conformance.__all__] == []


@pytest.mark.parametrize(
    ("target", "page", "site"),
    [
        ("../MAPPING.md", "schema.md", "mapping.md"),
        ("../README.md", "loop.md", "index.md"),
        ("docs/loop.md", "index.md", "loop.md"),
        ("docs/resuming.png", "index.md", "resuming.png"),
        ("MAPPING.md", "contributing.md", "mapping.md"),
        ("../schema.md", "api/config.md", "../schema.md"),
        ("training.md", "api/index.md", "training.md"),
        ("../../CHANGELOG.md", "api/index.md", "../changelog.md"),
    ],
)
def test_a_link_of_the_checkout_leads_to_the_same_page_in_the_site(
    hooks: ModuleType, target: str, page: str, site: str
) -> None:
    assert hooks.in_site(target, page) == site


def test_nothing_else_of_a_page_changes(hooks: ModuleType) -> None:
    text = "[a](https://example.org/b.md) [b](#c) [c](mailto:a@example.org) [d](sharding.md#e) | f \\| g | `h`"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="loop.md"))
    assert hooks.on_page_markdown(text, page, None, None) == text
    assert hooks.on_page_markdown("| `a \\| b` |", page, None, None) == "| `a | b` |"


def test_the_site_has_all_braces_of_a_page() -> None:
    """Extensions such as `attr_list` take them for attributes, and drop what is between them."""
    named = [each if isinstance(each, str) else next(iter(each)) for each in SITE["markdown_extensions"]]
    given = {name: each[name] for name, each in zip(named, SITE["markdown_extensions"], strict=True) if name != each}
    for page in (*DOCS.rglob("*.md"), *(ROOT / page for page in ("README.md", "MAPPING.md", "CHANGELOG.md"))):
        source = page.read_text(encoding="utf-8")
        if "{" in source:
            built = markdown.markdown(source, extensions=named, extension_configs=given)
            text = html.unescape(re.sub(r"<[^>]+>", "", built))
            assert (page.name, text.count("{")) == (page.name, source.count("{"))


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"repo_url", "edit_uri", "extra_css", "extra_javascript"} & SITE.keys()
