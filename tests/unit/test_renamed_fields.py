"""A field that was renamed is accepted under its old name for one release, with one plain note."""

import json
import warnings

import pytest
from running import run

import unishard
from unishard.config import Sharding
from unishard.config.loading.renamed import RENAMED
from unishard.errors import RenamedFieldWarning

OLD, NEW = "sharding.whole_units", "sharding.conditional_modules"
NOTE = f"{OLD} was renamed to {NEW}; use the new name, the next release rejects the old one"
TEXT = "backend: fsdp\nsharding:\n  strategy: full_shard\n  # experts\n  whole_units: [Expert]  # routed\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cfg.yaml"
    path.write_text(TEXT)
    return path


def load(*args):
    """The config, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = unishard.load(*args)
    assert all(issubclass(each.category, RenamedFieldWarning) for each in caught)
    return cfg, [str(each.message) for each in caught]


def test_every_renamed_field_has_its_new_name():
    fields = dict(unishard.config.leaves(unishard.Config))
    assert RENAMED == {OLD: NEW}
    assert all(new in fields and old not in fields for old, new in RENAMED.items())


def test_a_file_is_named_with_the_line(file):
    cfg, notes = load(file)
    assert cfg.sharding.conditional_modules == ["Expert"]
    assert notes == [f"{file}:5: {NOTE}"]


def test_an_override_may_use_the_old_name(file):
    cfg, notes = load(file, [f"{OLD}=[Router]"])
    assert cfg.sharding.conditional_modules == ["Router"]
    assert notes == [f"{file}:5: {NOTE}", f"override: {NOTE}"]


def test_the_new_name_overrides_the_old_one(file):
    assert load(file, [f"{NEW}=[Router]"])[0].sharding.conditional_modules == ["Router"]


def test_the_new_name_warns_of_nothing():
    assert load({"sharding": {"conditional_modules": ["Expert"]}})[1] == []


@pytest.mark.parametrize("build", [lambda old: Sharding(**old), lambda old: unishard.Config(sharding=old).sharding])
def test_python_may_use_the_old_name(build):
    with pytest.warns(RenamedFieldWarning, match="whole_units was renamed to conditional_modules"):
        assert build({"whole_units": ["Expert"]}).conditional_modules == ["Expert"]


def test_both_names_are_an_error(file):
    file.write_text(f"{TEXT}  conditional_modules: [Expert]\n")
    what = f"{OLD}: is the old name of conditional_modules, which is set too; remove whole_units"
    with pytest.raises(unishard.ConfigError) as refused:
        unishard.load(file)
    assert str(refused.value) == f"{file}:5: {what}"
    with pytest.raises(ValueError, match="is the old name of conditional_modules"):
        Sharding(whole_units=["Expert"], conditional_modules=["Expert"])


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "{file}", "fsdp"),
        ("translate", "{file}", "--to", "accelerate"),
        ("translate", "{file}", "--to", "unishard", "--report", "markdown"),
        ("diff", "{file}", "{file}"),
        ("translate", "{folder}", "--to", "unishard"),
    ],
)
def test_the_command_line_says_it_once(file, command):
    result = run(*(word.format(file=file, folder=file.parent) for word in command))
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert said.count("was renamed") == 1
    assert f"warning: {file}:5: {NOTE}" in said


def test_a_report_in_json_holds_the_note(file):
    result = run(
        "translate",
        str(file),
        "--to",
        "deepspeed",
        "--set",
        "backend=deepspeed",
        "--set",
        f"{OLD}=[Router]",
        "--report",
        "json",
    )
    assert json.loads(result.stderr)["warnings"] == [f"{file}:5: {NOTE}", f"override: {NOTE}"]
    assert "Router" in result.stdout
