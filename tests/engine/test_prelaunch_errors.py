"""Which processes tell waiting ranks of their errors: those that a launcher has started, not those that a rank has
started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unishard.config.loading.launched import variables

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
SAY = "import unishard, sys; unishard.load(); print(sys.excepthook is not sys.__excepthook__, 'torch' in sys.modules)"
LOADER = (
    "import unishard, sys; unishard.dataloader([1, 2], unishard.Config(backend='fsdp')); "
    "print(sys.excepthook.__module__)"
)
HELPER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAY!r}], check=True)"


@pytest.mark.parametrize(("code", "environ", "told"), [(SAY, RANK, True), (SAY, {}, False), (HELPER, RANK, False)])
def test_only_a_rank_itself_tells_of_its_errors(code: str, environ: dict[str, str], told: bool, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("backend: fsdp\n")
    environ = environ | variables(str(tmp_path / "cfg.yaml"), [])
    if code is HELPER and not Path("/proc/self/environ").exists():
        pytest.skip("no /proc")
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(told), "False"]


def test_the_first_call_that_belongs_to_a_rank_begins_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADER], env=os.environ | RANK, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["unishard.failures.prelaunch_errors"]
