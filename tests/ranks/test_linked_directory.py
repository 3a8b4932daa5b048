"""A link that somebody puts in place of the directory of a run that saves is named on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import BACKENDS, checked, my_rank, own_share, prepare, update

from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks


def is_linked(root: str, backend: str, target: str) -> str:
    """What a save raises after the first one."""
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
