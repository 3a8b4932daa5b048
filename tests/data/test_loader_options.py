"""The options of torch's DataLoader in `unishard.dataloader`."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

import unishard
from unishard.data.loader import _DECIDED

CFG = unishard.Config.model_validate({"training": {"micro_batch_size": 2}})
ACCEPTED = {
    "num_workers": 2,
    "collate_fn": sum,
    "pin_memory": False,
    "timeout": 30,
    "worker_init_fn": print,
    "multiprocessing_context": "spawn",
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
}
OURS = {"shuffle", "drop_last"}
"""They go to our sampler."""


def test_each_option_of_torch_is_accepted_or_refused():
    known = inspect.signature(unishard.dataloader).parameters
    assert set(inspect.signature(DataLoader).parameters) - {"dataset"} == {*ACCEPTED, *OURS, *_DECIDED}
    assert {*ACCEPTED, *OURS} <= set(known)


def test_each_option_reaches_the_loader():
    loader = unishard.dataloader(range(8), CFG, **ACCEPTED)
    got = {name: getattr(loader, name) for name in ACCEPTED}
    got["multiprocessing_context"] = got["multiprocessing_context"].get_start_method()
    assert got == ACCEPTED


def test_a_batch_is_what_collate_fn_makes():
    assert list(unishard.dataloader(range(6), CFG, shuffle=False, collate_fn=sum)) == [1, 5, 9]


def test_a_misspelled_option_is_refused():
    with pytest.raises(TypeError, match=r"dataloader\(\) got an unexpected keyword argument 'num_worker'"):
        unishard.dataloader(range(6), CFG, num_worker=2)
    with pytest.raises(
        unishard.DataError, match="does not accept pin_memory_device: it is that of the current accelerator"
    ):
        unishard.dataloader(range(6), CFG, pin_memory_device="cuda")


@pytest.mark.parametrize("switch", ["shuffle", "drop_last", "pin_memory", "persistent_workers"])
@pytest.mark.parametrize("value", ["False", "no", 2, []])
def test_a_switch_is_true_or_false(switch, value):
    with pytest.raises(unishard.DataError, match=f"dataloader: {switch} must be True or False, got "):
        unishard.dataloader(range(6), CFG, **{switch: value})
    assert len(unishard.dataloader(range(5), CFG, drop_last=1)) == 2
