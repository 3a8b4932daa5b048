"""A link that somebody puts in place of the directory of a run that saves is named on every rank."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch.distributed as dist
from harness import BACKENDS, checked, my_rank, own_share, play, prepare, update

pytestmark = pytest.mark.ranks


def is_linked(backend: str, target: str) -> tuple[str, str]:
    """What a save raises, and the directory."""
    folder: list[str] = [""]
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        root = Path(folder[0], "run")
        with prepare(checked(backend, checkpoint={"dir": str(root)})) as engine:
            update(engine, own_share(1)[0])
            engine.save()
            engine.mean(1.0)
            if my_rank() == 0:
                root.rename(root.with_name("aside"))
                root.symlink_to(root.with_name(target))
            engine.mean(1.0)
            update(engine, own_share(1)[0])
            try:
                engine.save()
            except Exception as error:
                return f"{type(error).__name__}: {error}", str(root)
            finally:
                engine.mean(1.0)  # rank 0 deletes the folder
    return "", str(root)


CELLS = tuple((is_linked, (backend, target)) for backend, target in zip(BACKENDS, ("run", "nothing"), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=["to itself", "to nothing"])
def test_a_link_to_no_directory_is_one_error_on_every_rank(cell):
    for rank in play(CELLS)[cell]:
        said, root = rank.value
        target = str(Path(root).with_name(cell[1][1]))
        assert said == (
            f"CheckpointError: save: {root} is a link to {target}, where no directory is; remove the link, or make "
            "that directory"
        )
