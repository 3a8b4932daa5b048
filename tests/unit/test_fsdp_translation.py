"""The form of data parallelism that a config becomes on PyTorch is a native config, with every constant."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.report import Translation
from unishard_fsdp import backend
from unishard_fsdp.options import CONSTANTS, FORMS, parse

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"]


PRECISIONS = ["fp32", "bf16", {"compute": "bf16", "reduce": "bf16"}]


def translate(**sections: Any) -> Translation:
    return backend.translate(Config.model_validate(sections), Topology(world_size=2, local_world_size=2))


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, PRECISIONS)))
def test_it_is_a_native_config_with_the_constants_of_its_form(strategy: str, precision: Any) -> None:
    native = translate(sharding=strategy, precision=precision).native
    assert parse(native).model_dump() == native
    for key, (value, _) in CONSTANTS.items():
        section, _, leaf = key.rpartition(".")
        if (section or leaf) in FORMS[native["data_parallel"]].model_fields:
            assert (native[section] if section else native)[leaf] is value
