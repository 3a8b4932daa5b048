"""Marks what starts ranks, so that `pytest -m "not ranks"` is quick; skips what is marked `gpu` where there is no CUDA
device.

`--deep` runs what is marked `deep` too: the same on the other engine or on one rank, where `make test` takes them in
turns. It also takes every engine with every strategy, gives Hypothesis's tests all their examples, and damages a file
in every place.
`--examples` asks for more broken documents for the formats. The longest files come first, so that all processes of
`make test` end together.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The models are tiny: a second thread only waits for the first, and long where ranks or other tests keep the cores busy
# (4 updates of the oracle: 0.2 s with one thread, 31 s with two). Set before torch is imported, and for the processes
# that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a clock and without chance: the same examples everywhere, on a busy machine too.
for _name, _number in (("unishard", 24), ("deep", 100)):
    settings.register_profile(
        _name, max_examples=_number, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )

_EXAMPLES = {False: 100, True: 300}
"""By whether `--deep` is asked for."""
_RANKS = Path(__file__).parent / "ranks"
_LONGEST = (
    *("ranks/test_conformance.py", "docs/test_pages.py", "ranks/test_faults.py", "integrations/test_on_trainer.py"),
    *("ranks/test_resuming.py", "ranks/test_mistakes.py", "integrations/test_long_sequences.py", "ranks/test_demo.py"),
    *("ranks/test_hybrid_sequences.py", "ranks/test_tensor_parallel.py", "ranks/test_expert_parallel.py"),
    *("integrations/test_on_lightning.py", "integrations/test_on_trl.py", "integrations/test_on_accelerate.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        metavar="N",
        help="how many broken documents the formats are given (see make fuzz)",
    )
    parser.addoption("--deep", action="store_true", help="also run what is marked deep")
    parser.addoption("--bless", action="store_true", help="write what tests/console and tests/golden hold anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--deep"):
        os.environ["TESTS_DEEP"] = "1"
    settings.load_profile("deep" if config.getoption("--deep") else "unishard")
    gc.disable()  # until all tests are collected: a third of the time that takes


@pytest.fixture
def deep(request: pytest.FixtureRequest) -> bool:
    """Whether to look at every place, and not only at every few."""
    asked: bool = request.config.getoption("--deep")
    return asked


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """How many broken documents the formats are given; from 1000 on they are others in each run."""
    number: int | None = request.config.getoption("--examples")
    return number or _EXAMPLES[request.config.getoption("--deep")]


@pytest.fixture(autouse=True)
def _process_group_ends_with_the_test() -> Iterator[None]:
    """`unishard.from_pretrained` and `prepare` start one, which would be that of a later test in the same process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_collection_finish() -> None:
    gc.freeze()  # else each full collection goes through the thousands of tests again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--deep"):
        items[:] = [item for item in items if item.get_closest_marker("deep") is None]
    order = {_RANKS.parent / name: place for place, name in enumerate(_LONGEST)}
    of_ranks = {path: _RANKS in path.parents for path in {item.path for item in items}}
    items.sort(key=lambda item: order.get(item.path, len(order) + (not of_ranks[item.path])))
    for item in items:
        if of_ranks[item.path]:
            item.add_marker("ranks")
        if item.get_closest_marker("gpu") is not None and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@cache
def _has_gpu() -> bool:
    import torch  # asked only where a test needs one

    return torch.cuda.is_available()
