"""What a config becomes on PyTorch: which form of data parallelism, with which arguments, and what the report says of
it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from unishard.config import Config, leaves
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.report import Line, Translation
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, TranslationError
from unishard_fsdp import backend
from unishard_fsdp.options import CONSTANTS, FORMS, parse
from unishard_fsdp.rules import RULES

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"]
PRECISIONS = ["fp32", "bf16", {"compute": "bf16", "reduce": "bf16"}]


def translate(**sections: Any) -> Translation:
    return backend.translate(Config.model_validate(sections), Topology(world_size=2, local_world_size=2))


def line(translation: Translation, path: str) -> Line:
    return next(line for line in translation.report if line.path == path)


def problems(**sections: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        translate(**sections)
    return {problem.path: problem.what for problem in caught.value.problems}


def test_every_field_has_a_rule_in_the_order_of_the_schema() -> None:
    assert list(RULES) == [path for path, _ in leaves(Config)]


@pytest.mark.parametrize(
    ("strategy", "precision", "engine", "synced", "resharded"),
    [
        ("no_shard", "fp32", "DistributedDataParallel", "last", None),
        ("no_shard", "bf16", "FSDPModule", "last", "last"),
        ("shard_optimizer", "fp32", "FSDPModule", "last", "last"),
        ("shard_optimizer", "bf16", "FSDPModule", "last", "last"),
        ("shard_grad_op", "fp32", "FSDPModule", "every", "last"),
        ("shard_grad_op", "bf16", "FSDPModule", "every", "last"),
        ("full_shard", "fp32", "FSDPModule", "every", "every"),
        ("full_shard", "bf16", "FSDPModule", "every", "every"),
    ],
)
def test_a_strategy_means_when_gradients_are_reduced_and_when_parameters_are_dropped(
    strategy: str, precision: str, engine: str, synced: str, resharded: str | None
) -> None:
    translation = translate(sharding=strategy, precision=precision, strict=True).check(strict=True)
    native = translation.native
    assert translation.engine == engine
    assert native["requires_gradient_sync"] == f"{synced}_micro_batch"
    assert native.get("reshard_after_backward") == (resharded and f"{resharded}_micro_batch")
    assert native.get("reshard_after_forward", strategy == "full_shard") is (strategy == "full_shard")


@pytest.mark.parametrize(("strategy", "precision", "overlap"), list(product(STRATEGIES, PRECISIONS, [True, False])))
def test_by_default_nothing_is_approximate_and_the_result_is_a_native_config(
    strategy: str, precision: Any, overlap: bool
) -> None:
    translation = translate(sharding=strategy, precision=precision, communication={"overlap": overlap}).check(
        strict=True
    )
    assert parse(translation.native).model_dump() == translation.native
    assert {line.fit for line in translation.report} <= {Fit.EXACT, Fit.EQUIVALENT}


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, PRECISIONS)))
def test_the_constants_are_written_wherever_the_form_has_them(strategy: str, precision: Any) -> None:
    native = translate(sharding=strategy, precision=precision).native
    for key, (value, _) in CONSTANTS.items():
        section, _, leaf = key.rpartition(".")
        if (section or leaf) in FORMS[native["data_parallel"]].model_fields:
            assert (native[section] if section else native)[leaf] is value


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_accumulation_is_what_fsdp2_does_until_it_reduces_and_else_refused(strategy: str) -> None:
    low = translate(sharding=strategy, precision={"compute": "bf16", "reduce": "bf16", "accumulate": "bf16"})
    if strategy in ("no_shard", "shard_optimizer"):
        assert low.check(strict=True).native["requires_gradient_sync"] == "last_micro_batch"
    else:
        with pytest.raises(
            TranslationError,
            match=r"precision\.accumulate: 'bf16' is not supported by fsdp: .*fp32 master weight; remove it",
        ):
            low.check(strict=False)
    with pytest.raises(TranslationError, match=r"precision\.accumulate"):
        translate(sharding=strategy, precision={"compute": "bf16", "accumulate": "bf16"}).check(strict=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_masters_each_micro_batch_is_reduced_and_added_up_in_the_low_format(strategy: str) -> None:
    native = translate(sharding=strategy, precision={"compute": "bf16", "master": "bf16"}).check(strict=True).native
    assert native["requires_gradient_sync"] == "every_micro_batch"
    assert native["mp_policy"]["param_dtype"] == "bfloat16"
    assert native["mp_policy"]["reduce_dtype"] == "float32"


def test_bf16_keeps_fp32_masters_and_reduces_in_fp32_unless_asked() -> None:
    policy = translate(precision="bf16").native["mp_policy"]
    assert (policy["param_dtype"], policy["reduce_dtype"]) == ("bfloat16", "float32")
    policy = translate(precision={"compute": "bf16", "reduce": "bf16"}).native["mp_policy"]
    assert policy["reduce_dtype"] == "bfloat16"


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer"])
def test_gradients_reduced_in_bf16_still_accumulate_in_fp32(strategy: str) -> None:
    translation = translate(sharding=strategy, precision={"compute": "bf16", "reduce": "bf16"})
    assert translation.native["requires_gradient_sync"] == "every_micro_batch"
    assert line(translation, "precision.reduce").fit is Fit.EQUIVALENT


def test_fsdps_own_shard_grad_op_is_full_shard_that_keeps_its_parameters() -> None:
    native = translate(sharding={"strategy": "full_shard", "reshard_after_forward": False}).native
    assert (native["reshard_after_forward"], native["reshard_after_backward"]) == (False, "every_micro_batch")


def test_sizes_of_collectives() -> None:
    buckets = {"reduce_bucket_size": 2**20}
    assert translate(sharding="no_shard", communication=buckets).native["bucket_cap_mb"] == 4.0
    assert line(translate(communication=buckets), "communication.reduce_bucket_size").fit is Fit.EQUIVALENT
    assert translate(communication={"prefetch_bucket_size": 7}).native["prefetch_numel"] == 7
    assert translate(sharding="shard_grad_op").native["prefetch_numel"] is None


@pytest.mark.parametrize("strategy", ["shard_optimizer", "shard_grad_op", "full_shard"])
def test_offload_of_everything_the_strategy_has(strategy: str) -> None:
    offload = {"optimizer": "cpu", "pin_memory": False} | ({"params": "cpu"} if strategy == "full_shard" else {})
    translation = translate(sharding=strategy, offload=offload).check(strict=True)
    assert translation.native["offload_policy"] == {"pin_memory": False}
    assert translate(sharding=strategy).native["offload_policy"] is None


@pytest.mark.parametrize(
    ("sections", "path", "instead"),
    [
        (
            {
                "sharding": "shard_optimizer",
                "offload": {"optimizer": "cpu"},
                "native": {"fsdp": {"zero_redundancy_optimizer": True}},
            },
            "offload.optimizer",
            "remove native.fsdp.zero_redundancy_optimizer",
        ),
    ],
)
def test_offload_of_a_part_is_refused_with_a_way_out(sections: dict[str, Any], path: str, instead: str) -> None:
    translation = translate(**sections)
    with pytest.raises(TranslationError, match=f"{path}: 'cpu' is not supported by fsdp: .*{instead}"):
        translation.check(strict=False)


def test_offload_of_the_parameters_alone_takes_the_optimizer_along_and_says_so() -> None:
    translation = translate(offload={"params": "cpu", "pin_memory": False})
    assert translation.native["offload_policy"] == {"pin_memory": False}
    assert translation.native["host_optimizer"] is None
    assert line(translation, "offload.params").fit is Fit.APPROXIMATE
    with pytest.raises(
        TranslationError, match=r"offload\.params: 'cpu' is only approximate on fsdp, .*optimizer's state lives in host"
    ):
        translation.check(strict=True)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_the_optimizer_alone_is_stepped_on_host_copies(strategy: str) -> None:
    translation = translate(sharding=strategy, offload={"optimizer": "cpu", "pin_memory": False}).check(strict=True)
    assert (translation.native["offload_policy"], translation.native["host_optimizer"]) == (None, {"pin_memory": False})
    assert line(translation, "offload.optimizer").fit is Fit.EQUIVALENT
    assert translate(sharding=strategy, offload="cpu").native["host_optimizer"] is None


@pytest.mark.parametrize("field", ["params", "optimizer"])
def test_files_are_refused_with_a_way_out(field: str) -> None:
    translation = translate(offload={"params": "cpu", "optimizer": "cpu", "nvme_path": "/local"} | {field: "nvme"})
    with pytest.raises(
        TranslationError,
        match=f"offload.{field}: 'nvme' is not supported by fsdp: .*; choose cpu, or backend deepspeed",
    ):
        translation.check(strict=False)


def hybrid(strategy: str, topology: Topology, **sections: Any) -> Translation:
    sharding = {"strategy": strategy} | sections.pop("sharding", {})
    return backend.translate(Config.model_validate({"sharding": sharding, **sections}), topology)


NODES = Topology(world_size=8, local_world_size=4)


@pytest.mark.parametrize(
    ("strategy", "within"), [("hybrid_shard", "full_shard"), ("hybrid_shard_grad_op", "shard_grad_op")]
)
@pytest.mark.parametrize(("reduce", "averaged"), [("fp32", "last_micro_batch"), ("bf16", "every_micro_batch")])
def test_hybrid_is_the_plain_strategy_on_a_mesh_of_two_axes(
    strategy: str, within: str, reduce: str, averaged: str
) -> None:
    precision = {"compute": "bf16", "reduce": reduce}
    native = hybrid(strategy, NODES, precision=precision).check(strict=True).native
    plain = hybrid(within, NODES, precision=precision).native
    assert native == plain | {"mesh": {"replicate": 2, "shard": 4}, "requires_all_reduce": averaged}
    assert (plain["mesh"], plain["requires_all_reduce"]) == (None, None)
    parse(native)


def test_the_size_of_a_group_is_that_of_a_node_unless_it_is_said() -> None:
    assert hybrid("hybrid_shard", NODES, sharding={"group_size": 2}).native["mesh"] == {"replicate": 4, "shard": 2}
    one_node = Topology(world_size=4, local_world_size=4)
    assert hybrid("hybrid_shard", one_node).native == hybrid("full_shard", one_node).native


def test_when_groups_are_averaged_can_be_set_where_there_are_groups() -> None:
    early = {"fsdp": {"requires_all_reduce": "every_micro_batch"}}
    translation = hybrid("hybrid_shard", NODES, native=early)
    assert line(translation, "native.fsdp.requires_all_reduce").fit is Fit.EQUIVALENT
    bf16 = {"compute": "bf16", "reduce": "bf16"}
    late = hybrid("hybrid_shard", NODES, precision=bf16, native={"fsdp": {"requires_all_reduce": "last_micro_batch"}})
    assert line(late, "native.fsdp.requires_all_reduce").fit is Fit.APPROXIMATE
    assert problems(native=early) == {
        "native.fsdp.requires_all_reduce": "is only for hybrid strategies; set sharding.strategy to hybrid_shard or "
        "remove it"
    }


def test_a_native_setting_takes_effect_and_has_its_own_line() -> None:
    translation = translate(
        native={"fsdp": {"requires_gradient_sync": "last_micro_batch", "mp_policy": {"output_dtype": "float32"}}}
    )
    assert translation.native["requires_gradient_sync"] == "last_micro_batch"
    assert translation.native["mp_policy"]["output_dtype"] == "float32"
    assert translation.native["mp_policy"]["cast_forward_inputs"] is True
    assert line(translation, "native.fsdp.requires_gradient_sync").value == "last_micro_batch"
    assert line(translation, "native.fsdp.mp_policy.output_dtype").value == "float32"


def test_what_is_cast_is_said_by_a_field() -> None:
    def cast(cast_inputs: object, **sections: object) -> object:
        return translate(**({"precision": {"compute": "bf16", "cast_inputs": cast_inputs}} | sections)).native[
            "mp_policy"
        ]

    assert [cast(asked)["cast_forward_inputs"] for asked in (True, False, ["x"])] == [True, False, False]
    assert problems(native={"fsdp": {"mp_policy": {"cast_forward_inputs": False}}}) == {
        "native.fsdp.mp_policy.cast_forward_inputs": "is decided by precision.cast_inputs; set it there"
    }


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({}, {"mp_policy": {"output_dtype": "float32"}}),
        ({}, {"reduce_scatter_unused_params": True}),
        ({"sharding": "no_shard"}, {"forward_sync_buffers": True}),
        ({"precision": {"compute": "bf16", "reduce": "bf16"}}, {"requires_gradient_sync": "last_micro_batch"}),
    ],
)
def test_a_native_setting_that_may_train_something_else_is_approximate(
    sections: dict[str, Any], settings: dict[str, Any]
) -> None:
    translation = translate(native={"fsdp": settings}, **sections)
    ((path, _),) = flat(settings)
    assert line(translation, f"native.fsdp.{path}").fit is Fit.APPROXIMATE
    assert translation.check(strict=False) is translation
    with pytest.raises(TranslationError, match=f"native.fsdp.{path}: "):
        translation.check(strict=True)


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({}, {"requires_gradient_sync": "last_micro_batch", "reshard_after_backward": "last_micro_batch"}),
        ({"precision": "bf16"}, {"requires_gradient_sync": "last_micro_batch"}),
        ({"precision": {"compute": "bf16", "reduce": "bf16"}}, {"requires_gradient_sync": "every_micro_batch"}),
        ({}, {"separate_reduce_scatter_group": True, "symm_mem_for_comm": True}),
        ({"sharding": "shard_grad_op"}, {"allocate_memory_from_process_group_for_comm": True}),
        (
            {"sharding": "no_shard"},
            {"gradient_as_bucket_view": False, "static_graph": True, "find_unused_parameters": True},
        ),
    ],
)
def test_a_native_setting_about_time_memory_or_collectives_passes_strict(
    sections: dict[str, Any], settings: dict[str, Any]
) -> None:
    translation = translate(native={"fsdp": settings}, **sections).check(strict=True)
    assert {line(translation, f"native.fsdp.{key}").fit for key in settings} == {Fit.EQUIVALENT}


def test_settings_of_another_backend_are_left_to_it() -> None:
    assert translate(native={"deepspeed": {"anything": 1}}).native == translate().native


def test_zero_redundancy_optimizer_is_ddp() -> None:
    translation = translate(sharding="shard_optimizer", native={"fsdp": {"zero_redundancy_optimizer": True}}).check(
        strict=True
    )
    assert translation.engine == "DistributedDataParallel"
    assert translation.native["zero_redundancy_optimizer"] is True
    assert line(translation, "sharding.strategy").fit is Fit.EXACT


@pytest.mark.parametrize(
    ("strategy", "precision"), [("no_shard", "fp32"), ("shard_grad_op", "fp32"), ("shard_optimizer", "bf16")]
)
def test_zero_redundancy_optimizer_elsewhere_is_refused(strategy: str, precision: str) -> None:
    found = problems(sharding=strategy, precision=precision, native={"fsdp": {"zero_redundancy_optimizer": True}})
    assert "shard_optimizer and precision.compute fp32" in found["native.fsdp.zero_redundancy_optimizer"]


def test_buffers_of_collectives_come_from_one_place() -> None:
    found = problems(native={"fsdp": {"symm_mem_for_comm": True, "allocate_memory_from_process_group_for_comm": True}})
    assert list(found) == ["native.fsdp.symm_mem_for_comm"]
    assert found["native.fsdp.symm_mem_for_comm"].endswith("remove one of the two")


def test_all_problems_of_native_settings_are_told_at_once() -> None:
    found = problems(
        native={
            "fsdp": {
                "requires_gradient_synch": "last_micro_batch",
                "reshard_after_forward": False,
                "mp_policy": {"param_dtype": "bfloat16"},
                "offload_policy": {"pin_memory": False},
                "find_unused_parameters": True,
            }
        }
    )
    assert found == {
        "native.fsdp.requires_gradient_synch": "unknown key; did you mean 'requires_gradient_sync'?",
        "native.fsdp.reshard_after_forward": "is decided by sharding.reshard_after_forward; set it there",
        "native.fsdp.mp_policy.param_dtype": "is decided by precision.compute; set it there",
        "native.fsdp.offload_policy.pin_memory": "is decided by offload.pin_memory; set it there",
        "native.fsdp.find_unused_parameters": (
            "belongs to DistributedDataParallel, but this strategy and precision use fully_shard; remove it"
        ),
    }


@pytest.mark.parametrize(
    ("settings", "path", "what"),
    [
        (
            {"requires_gradient_sync": "never"},
            "native.fsdp.requires_gradient_sync",
            "is 'never'; write one of every_micro_batch, last_micro_batch",
        ),
        ({"reduce_scatter_unused_params": 1}, "native.fsdp.reduce_scatter_unused_params", "is 1; write true or false"),
        (
            {"mp_policy": {"output_dtype": "fp8"}},
            "native.fsdp.mp_policy.output_dtype",
            "is 'fp8'; write one of float32, bfloat16, float16, or null",
        ),
    ],
)
def test_a_native_value_of_the_wrong_kind(settings: dict[str, Any], path: str, what: str) -> None:
    assert problems(native={"fsdp": settings}) == {path: what}
