"""docs/integrity.md is made of what the programs have recorded, and nothing in it is lost or missed."""

from __future__ import annotations

from dev.integrity.damaging import Outcome
from dev.integrity.figures import causes, cut_off, damaged_files, killed
from dev.integrity.page import MEASURED, section

KEPT = MEASURED.kept()
"""What the last runs have recorded."""
TODAY = {"date": "2026-01-01"}


def test_nothing_was_lost_and_no_damage_missed():
    assert KEPT.keys() == {"saves", "runs", "files"}, "run make integrity"
    assert sum(part["wrong"] for part in KEPT["saves"]["parts"].values()) == KEPT["saves"]["full wrong"] == 0
    assert sum(phase["wrong"] for phase in KEPT["runs"]["phases"].values()) == 0
    assert sum(tries["missed"] for tries in KEPT["files"]["tries"].values()) == 0


def test_saves_that_were_cut_off_are_counted_by_their_part():
    played = [
        ("tensors", False, True),
        ("tensors", False, False),
        ("gather_object", False, True),
        ("latest", True, True),
    ]
    text = section({"saves": TODAY | cut_off(played, 2.5, [True, False])})
    assert "| tensors | 2 | 1 | 0 | 1 |" in text
    assert "| messages between the ranks | 1 | 1 | 0 | 0 |" in text
    assert "| naming it as the newest | 1 | 0 | 1 | 0 |" in text
    assert "4 saves cut off, 1 with another outcome" in text
    assert "In 2 more saves the disk ran full; 1 ended otherwise." in text


def test_kills_of_runs_are_counted_by_their_phase():
    kill = {"phase": "step", "wrong": [], "lost": 1, "cause": 0.5, "again": 9.0}
    kills = [
        kill,
        kill | {"lost": 3, "cause": 1.5, "wrong": ["a rank lives on"]},
        kill | {"phase": "prepare", "cause": None},
    ]
    text = section({"runs": TODAY | killed(kills)})
    assert "| updates | 2 | 1 | 3 | 1.0, at most 1.5 | 9.0, at most 9.0 |" in text
    assert "| `prepare` | 1 | 0 | 1 |  | 9.0, at most 9.0 |" in text


def test_damage_is_counted_once_whatever_the_number_of_ranks():
    found = Outcome("a", "flip", (0.5, 3), True, True, 0.25)
    missed = Outcome("b", "flip", (0.5, 3), True, False, 0.75)
    text = section({"files": TODAY | damaged_files({"fsdp": [found, missed, found, missed]})})
    assert "| fsdp | one bit flipped | 2 | 2 | 1 | 0.500, at most 0.750 |" in text


def test_causes_are_the_last_column_of_the_other_page():
    page = [
        ("One rank ends", ["`kill -9`", "`engine.step`", "a line", "", "0.5 / 2.5"]),
        ("One rank ends", ["`kill -9`", "`engine.save`", "a line", "", ""]),
        ("Disks", ["full", "`engine.save`", "a line", "", "0.25 / 0.75"]),
    ]
    assert causes(page) == {
        "`kill -9`": {"runs": 2, "seconds": [0.5, 1.5, 2.5]},
        "disks": {"runs": 2, "seconds": [0.25, 0.5, 0.75]},
    }
