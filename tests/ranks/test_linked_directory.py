"""A link that somebody puts in place of the directory of a run that saves is named on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import BACKENDS, checked, in_turn, my_rank, own_share, prepare, update

from unishard.checkpoint import lease
from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks


def is_linked(root: str, backend: str, target: str) -> str:
    """What a save raises after the first one."""
    lease.GRACE = 0.5
    with prepare(checked(backend, checkpoint={"dir": root})) as engine:
        update(engine, own_share(1)[0])
        engine.save()
        engine.mean(1.0)
        if my_rank() == 0:
            Path(root).rename(Path(root).with_name("aside"))
            Path(root).symlink_to(target)
        engine.mean(1.0)
        update(engine, own_share(1)[0])
        try:
            engine.save()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("backend", "to"), [*zip(BACKENDS, ("run", "nothing"), strict=True)])
def test_a_link_to_no_directory_is_one_error_on_every_rank(tmp_path, backend, to):
    root, target = tmp_path / "run", tmp_path / to
    said = (
        f"CheckpointError: save: {root} is a link to {target}, where no directory is; remove the link, or make that "
        "directory"
    )
    assert run_ranks(2, is_linked, str(root), backend, str(target)) == [said, said]


@in_turn
def test_a_link_to_the_directory_of_another_live_run_is_refused_and_to_its_own_is_followed(tmp_path, backend):
    root, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    lease.acquire(other, "1f3a9c2e")  # this process, which lives
    before = sorted(path.name for path in other.iterdir())
    for said in run_ranks(2, is_linked, str(root), backend, str(other)):
        assert said.startswith("CheckpointError: ")
        assert "saves here and is still alive, and two runs would delete each other's checkpoints" in said
    assert sorted(path.name for path in other.iterdir()) == before
    root.unlink()
    (tmp_path / "aside").rename(tmp_path / "former")
    assert run_ranks(2, is_linked, str(root), backend, str(tmp_path / "aside")) == ["", ""]
    assert {path.name for path in (tmp_path / "aside").glob("step-*")} == {"step-00000001", "step-00000002"}
