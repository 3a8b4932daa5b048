from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from dev.pages.__main__ import main
from dev.pages.catalog import left_over, pages, sections
from dev.pages.formats import formats
from dev.pages.mapping import mapping
from dev.pages.private_names import BEGIN, END, private_names, replaced
from dev.pages.schema import schema
from unishard import Config
from unishard.checkpoint import manifest
from unishard.config import leaves
from unishard.contract import registry, training_facts
from unishard.contract.private_api import CORE_PRIVATE_API, PrivateApi
from unishard.errors import UnishardError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(pages()))
def test_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == pages()[name], "run `make docs` and commit it"


def test_no_page_of_a_format_that_is_gone_is_left() -> None:
    assert left_over(ROOT) == [], "run `make docs` and commit it"


def test_generated_part_is_current() -> None:
    (name,) = sections(ROOT)
    assert (ROOT / name).read_text(encoding="utf-8") == sections(ROOT)[name], "run `make docs` and commit it"


def test_pages_that_are_out_of_date_are_named_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "MAPPING.md").write_bytes(b"\xff\xfe")
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{name}: is out of date; run `make docs` and commit it" for name in pages()
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["MAPPING.md"], "--check writes nothing"
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: written" for name in pages()]
    assert main(["--check", "--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


def test_only_the_generated_part_of_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(tmp_path)])
    page = tmp_path / "docs/engines.md"
    page.write_text("By hand.\n", encoding="utf-8")
    assert main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("docs/engines.md: no generated section; ")
    page.write_text(f"By hand.\n{BEGIN}\n{END}\nThe rest.\n", encoding="utf-8")
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "docs/engines.md: written\n"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("By hand.\n")
    assert text.endswith("The rest.\n")
    assert "### Private names: fsdp" in text


def test_the_hook_looks_at_every_page_and_at_what_they_are_made_from() -> None:
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    (files,) = [hook["files"] for hook in hooks if hook["id"] == "docs"]
    for name in (
        *pages(),
        *sections(ROOT),
        "dev/pages/schema.py",
        "unishard/config/sharding.py",
        "backends/unishard_fsdp/rules.py",
    ):
        assert re.search(files, name), name
    assert not re.search(files, "docs/loop.md")


def test_every_case_that_needs_private_names_is_on_the_page_with_all_of_them() -> None:
    text = sections(ROOT)["docs/engines.md"]
    for name, patches in {
        "every engine": CORE_PRIVATE_API,
        **{name: registry.get(name).private_api for name in registry.available()},
    }.items():
        section = text.partition(f"### Private names: {name}\n")[2].partition("\n##")[0].partition(END)[0]
        for patch in patches.values():
            (row,) = [line for line in section.splitlines() if line.startswith(f"| **{patch.name}**: ")]
            for each in (one for several in patch.names for one in several.split(" or ")):
                assert f"`{each.partition(':')[2]}`" in row
            assert patch.link in row
            assert patch.versions in row


def test_only_what_is_between_the_marks_is_written_anew() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb\n", "new", "p.md") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    for page in (f"a\n{BEGIN}\nb\n", f"{END}\n", ""):
        with pytest.raises(UnishardError, match=r"^p\.md: no generated section; add the lines "):
            replaced(page, "new", "p.md")


class _Third:
    name = "third"

    def __init__(self, *patches: PrivateApi) -> None:
        self.private_api = {patch.name: patch for patch in patches}


def test_a_table_of_private_names_says_what_happens_without_them() -> None:
    names = ("m.a:C.x or m.a:C.y", "m.a:f", "m.b:g")
    patch = PrivateApi(
        "odd", "A run that is odd,", names, "m 1 to 2", "https://example.org", "do another thing", until="3"
    )
    assert private_names([_Third()]).endswith("\n\n### Private names: third\n\nNone.")  # type: ignore[list-item]
    assert private_names([_Third(patch)]).splitlines()[-1] == (  # type: ignore[list-item]
        "| **odd**: A run that is odd | m.a: `C.x` or `C.y`, `f`<br>m.b: `g` | m 1 to 2; m does it itself from 3 on "
        "| [source](https://example.org) | Do another thing. |"
    )


@pytest.mark.parametrize("text", list(pages().values()), ids=list(pages()))
def test_tables_are_whole(text: str) -> None:
    assert text.startswith("<!-- Generated by `make docs`")
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table


def test_every_field_and_every_exception_is_on_the_page() -> None:
    text = pages()["MAPPING.md"]
    for path, _ in leaves(Config):
        assert f"| `{path.rpartition('.')[2]}` |" in text
        for name in registry.available():
            for case in registry.get(name).rules[path].when:
                assert f"| if {case.case} |" in text


def test_every_constant_is_on_the_page_with_its_reason() -> None:
    text = pages()["MAPPING.md"]
    for name in registry.available():
        assert f"## Always written: {name}" in text
        for key, (_, why) in registry.get(name).constants.items():
            assert re.search(rf"^\| `{re.escape(key)}` \| `.*` \| {re.escape(why)} \|$", text, flags=re.MULTILINE), key


def test_any_list_of_backends_has_a_page() -> None:
    text = mapping([registry.get("deepspeed")])
    assert "| Field | Values | deepspeed |" in text
    assert "fsdp" not in text.partition("## sharding")[2].partition("## Always written")[0].split("native.fsdp")[0]
    assert mapping([]).count("| `strategy` |") == 1


def test_reference_links_to_every_section() -> None:
    text = schema()
    for anchor in re.findall(r"\(#([a-z_]+)\)", text):
        assert re.search(rf"^## {'[.]?'.join(anchor)}$", text, flags=re.MULTILINE), anchor
    assert "Short form: `sharding: full_shard` means `sharding: {strategy: full_shard}`." in text


def test_every_field_of_the_manifest_is_on_its_page_with_what_it_is() -> None:
    text = pages()["docs/manifest.md"]
    sections = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", text, flags=re.MULTILINE)) | {
        "Manifest": text.partition("\n## ")[0]
    }
    kinds = {
        name: kind
        for module in (manifest, training_facts)
        for name, kind in vars(module).items()
        if isinstance(kind, type(BaseModel)) and kind not in (BaseModel, training_facts.Facts)
    }
    assert set(sections) == {*kinds}
    for name, kind in kinds.items():
        for field, facts in kind.model_fields.items():
            assert f"| `{field}` | " in sections[name]
            assert facts.description, field
    assert {anchor.lower() for anchor in re.findall(r"\(#([a-z]+)\)", text)} == {
        name.lower() for name in {*kinds} - {"Manifest"}
    }


def test_the_list_of_formats_leads_to_the_page_of_each_tool() -> None:
    text = pages()["docs/formats.md"]
    links = re.findall(r"^\| \[\w+\]\(([^)]+)\) \|", text, flags=re.MULTILINE)
    assert links == [name.removeprefix("docs/") for name in pages() if name.startswith("docs/formats/")]
    assert "| [accelerate](formats/accelerate.md) | Accelerate 1.15.0 | " in text


def test_every_key_and_every_field_of_every_format_is_on_its_page() -> None:
    tables = {one.name: (one.keys, one.rules) for one in formats()}
    tables |= {name: (registry.arguments(name).keys, registry.arguments(name).rules) for name in ("fsdp", "deepspeed")}
    assert {f"docs/formats/{name}.md" for name in tables} == {name for name in pages() if "formats/" in name}
    for name, (keys, rules) in tables.items():
        text = pages()[f"docs/formats/{name}.md"]
        for key in keys:
            assert f"`{key}`" in text
        for path, row in rules.items():
            assert f"| `{path}` | **{row.fit}** |" in text
            for case in row.when:
                assert f"| if {case.case.replace('|', chr(92) + '|')} |" in text


def test_the_page_of_a_format_that_is_gone_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(tmp_path)])
    page = tmp_path / "docs/formats/gone.md"
    page.touch()
    capsys.readouterr()
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "docs/formats/gone.md: is out of date; run `make docs` and commit it\n"
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "docs/formats/gone.md: removed\n"
    assert not page.exists()
