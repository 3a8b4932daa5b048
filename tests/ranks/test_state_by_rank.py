"""`engine.save(state=...)` where ranks pass the same, different, or no states."""

from __future__ import annotations

import pytest
import torch
from harness import config, my_rank, prepare

from unishard.testing import run_ranks

BACKENDS_IN_TURN = (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"))
STATES = {
    "same": ({"epoch": 3, "seen": torch.arange(4.0)}, {"epoch": 3, "seen": torch.arange(4.0)}),
    "different tensors": ({"seen": torch.arange(4.0)}, {"seen": torch.arange(4.0) + 1e-6}),
    "different numbers": ({"cursor": 5}, {"cursor": 6}),
    "of rank 0": ({"best": 0.5}, None),
    "of rank 1": (None, {"best": 0.25}),
    "none": (None, None),
}
BY_RANK = {"different tensors", "different numbers", "of rank 1"}


def saved(root):
    found = {}
    for backend, strategy in BACKENDS_IN_TURN:
        with prepare(config(backend, strategy)) as engine:
            for name, states in STATES.items():
                engine.load(engine.save(f"{root}/{backend}/{name}", state=states[my_rank()]))
                resumed = engine.load(f"{root}/{backend}/{name}")
                found[backend, name] = plain(resumed.state), resumed.notes
    return found


def loaded(root):
    found = {}
    for backend, strategy in BACKENDS_IN_TURN:
        with prepare(config(backend, strategy)) as engine:
            for name in STATES:
                resumed = engine.load(f"{root}/{backend}/{name}")
                found[backend, name] = plain(resumed.state), [note for note in resumed.notes if "`state`" in note]
    return found


def plain(state):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in (state or {}).items()}


@pytest.mark.ranks
def test_each_rank_gets_its_own_state_back_and_another_number_of_ranks_that_of_rank_0(tmp_path):
    for rank, found in enumerate(run_ranks(2, saved, str(tmp_path))):
        for (backend, name), (state, notes) in found.items():
            own = STATES[name][rank if name in BY_RANK else 0]
            assert (state, notes) == (plain(own), ()), (backend, name)
    (found,) = run_ranks(1, loaded, str(tmp_path))
    said = ["2 ranks saved a different `state` each; every rank gets that of rank 0"]
    for (backend, name), outcome in found.items():
        assert outcome == (plain(STATES[name][0]), said if name in BY_RANK else []), (backend, name)
