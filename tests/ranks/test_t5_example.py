"""examples/finetune_t5_lora.py: learns on both engines, takes a user's data, and says what is wrong with it."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forking import completed
from harness import run_script

from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_t5_lora.py"


WHOLE, SHORT = 55, 8
"""Updates until it has learned, and in which the losses of the engines differ by their last digits at most."""


@cache
def tuned(backend, steps):
    with TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        words = ["--set", f"backend={backend}", "--steps", str(steps), "--out", str(out)]
        run_ranks(2, run_script, SCRIPT, *words, timeout=200)
        return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.deep
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_learns_what_it_has_not_seen(backend):
    run = tuned(backend, WHOLE)
    assert len(run["losses"]) == WHOLE
    assert run["chance"] < 0.6
    assert run["accuracy"] > 0.9


@pytest.mark.deep
def test_both_engines_train_the_same():
    one, other = (tuned(backend, SHORT)["losses"] for backend in BACKENDS)
    assert len(one) == SHORT
    assert other == pytest.approx(one, rel=1e-5)


def test_it_takes_a_users_file_and_the_names_of_its_columns(tmp_path):
    data = tmp_path / "reviews.csv"
    data.write_text("review,stars\n" + "it was fine,good\nit was not,bad\n" * 10, encoding="utf-8")
    words = ["--data", data, "--text", "review", "--label", "stars", "--steps", "1"]
    done = completed([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "after 1 updates; accuracy" in done.stdout
    assert "on 4 held-out sentences" in done.stdout


BAD = {
    "empty.csv": ("text,label\n", "empty.csv holds no examples; it needs rows with the columns 'text' and 'label'"),
    "columns.csv": (
        "sentence,label\nfine,good\n",
        "example 1 has nothing in column 'text'; its columns are sentence, label; name another",
    ),
    "hole.jsonl": ('{"text": "fine", "label": "good"}\n{"text": "bad"}\n', "example 2 has nothing in column 'label'"),
    "broken.jsonl": ('{"text": "fine", "label": "good"}\n{"text": \n', "line 2 is not JSON"),
    "list.jsonl": ("[1, 2]\n", "line 1 is no object but a list"),
    "one.csv": ("text,label\nfine,good\n", "1 example is too few to train on some and hold out others"),
}


def read_badly(folder):
    """The message for each bad file; in one process, since importing costs more than the rest."""
    said = {}
    for name in [*BAD, "missing.csv", "no_such_dataset"]:
        try:
            run_script(SCRIPT, "--data", str(Path(folder, name)))
        except SystemExit as end:
            said[name] = str(end)
    return said


def test_bad_data_is_told_with_its_place(tmp_path):
    for name, (content, _) in BAD.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (said,) = run_ranks(1, read_badly, str(tmp_path))
    for name, (_, message) in BAD.items():
        assert message in said[name], said[name]
    assert "No such file or directory" in said["missing.csv"]
    assert "cannot be loaded by datasets" in said["no_such_dataset"]
