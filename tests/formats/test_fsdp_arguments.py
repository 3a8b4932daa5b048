"""FSDP's own arguments: what each says in the config's words, and how a config is said in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.config import Config, leaves
from unishard.config.nested import nested
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Undecided
from unishard.contract.rules import Fit

FSDP = registry.arguments("fsdp")
EIGHT = Topology(world_size=8, local_world_size=4)
NO_SHARD = {"sharding.strategy": "no_shard"}
RESHARDED = {"sharding.strategy": "full_shard", "sharding.reshard_after_forward": True}
GROUPS = {"sharding.strategy": "hybrid_shard", "sharding.reshard_after_forward": True}
WITHOUT_RESHARD = {"sharding.strategy": "full_shard", "sharding.reshard_after_forward": False}


def read(native, **options):
    return {entry.key: entry for entry in FSDP.read(native, **options)}


def fields(native, **options):
    return {field: value for entry in FSDP.read(native, **options) for field, value in entry.effect.fields.items()}


@pytest.mark.parametrize(
    ("word", "number", "said"),
    [
        ("FULL_SHARD", 1, RESHARDED),
        ("SHARD_GRAD_OP", 2, WITHOUT_RESHARD),
        ("NO_SHARD", 3, NO_SHARD),
        ("HYBRID_SHARD", 4, GROUPS),
        ("HYBRID_SHARD_ZERO2", "5", {"sharding.strategy": "hybrid_shard", "sharding.reshard_after_forward": False}),
    ],
)
def test_a_strategy_of_version_1_by_name_and_by_number(word, number, said):
    for value in (word, word.lower(), f"ShardingStrategy.{word}", number):
        assert read({"sharding_strategy": value})["sharding_strategy"].effect.fields == said


@pytest.mark.parametrize("value", ["zero3", 0, 6, "stage3", True, ["FULL_SHARD"]])
def test_a_word_of_another_tool_is_no_strategy(value):
    effect = read({"sharding_strategy": value})["sharding_strategy"].effect
    assert effect.fit is Fit.UNSUPPORTED
    assert "FULL_SHARD" in effect.note


@pytest.mark.parametrize(("value", "reshards"), [(True, True), ("false", False), (None, True), (1, False)])
def test_reshard_after_forward_of_version_2(value, reshards):
    said = fields({"version": 2, "reshard_after_forward": value})
    assert (said["sharding.strategy"], said.get("sharding.reshard_after_forward")) == ("full_shard", reshards)


def test_groups_after_forward_are_the_same_maths():
    effect = read({"version": 2, "reshard_after_forward": 4})["reshard_after_forward"].effect
    assert effect.fit is Fit.EQUIVALENT
    assert "groups of 4" in effect.note


def test_a_word_of_version_1_is_refused_by_version_2():
    effect = read({"version": 2, "reshard_after_forward": "FULL_SHARD"})["reshard_after_forward"].effect
    assert effect.fit is Fit.UNSUPPORTED
    assert "write true for FULL_SHARD" in effect.note


def test_version_1_is_taken_at_its_word_where_accelerate_ignores_it():
    launcher = {"version": 1, "sharding_strategy": "FULL_SHARD"}
    effect = read({"reshard_after_forward": "SHARD_GRAD_OP"}, defaults=launcher)["reshard_after_forward"].effect
    assert effect.fit is Fit.APPROXIMATE
    assert effect.fields == WITHOUT_RESHARD
    assert "Accelerate 1.15.0 ignores" in effect.note


def test_the_strategy_of_version_1_counts_more_than_reshard_after_forward():
    native = {"version": 1, "sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"}
    assert fields(native)["sharding.strategy"] == "no_shard"
    assert read(native)["reshard_after_forward"].effect.fit is Fit.IGNORED


@pytest.mark.parametrize(
    "native", [{"version": 1, "sharding_strategy": None}, {"version": 1, "reshard_after_forward": None}]
)
def test_null_is_the_default(native):
    assert fields(native)["sharding.strategy"] == "full_shard"


def test_version_2_has_no_strategy_word():
    native = {"version": 2, "sharding_strategy": "NO_SHARD"}
    assert read(native)["sharding_strategy"].effect.fit is Fit.IGNORED
    assert fields(native)["sharding.strategy"] == "full_shard"


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"replicate": 2, "shard": 4}, GROUPS | {"sharding.group_size": 4}),
        ({"replicate": 2, "shard": -1}, GROUPS | {"sharding.group_size": 4}),
        ({"shard": 4}, GROUPS | {"sharding.group_size": 4}),
        ({"replicate": 1, "shard": 8}, RESHARDED),
        ({"shard": -1}, RESHARDED),
        ({"replicate": 8, "shard": 1}, NO_SHARD),
        ({"replicate": 8}, NO_SHARD),
    ],
)
def test_a_mesh_decides_the_strategy(mesh, said):
    assert fields({"version": 2, "mesh": mesh}, topology=EIGHT) == {"backend": "fsdp", **said}


def test_groups_of_an_unknown_number_of_ranks_need_a_decision():
    found = fields({"version": 2, "mesh": {"replicate": 2, "shard": -1}})
    assert isinstance(found["sharding.group_size"], Undecided)


@pytest.mark.parametrize("mesh", ["2x4", {"dp": 2}, {}, {"shard": 0}, {"shard": "many"}])
def test_a_mesh_that_is_none(mesh):
    assert read({"version": 2, "mesh": mesh})["mesh"].effect.fit is Fit.UNSUPPORTED


def test_offload_moves_parameters_and_optimizer():
    said = fields({"version": 2, "cpu_offload": "true", "pin_memory": False})
    assert (said["offload.params"], said["offload.optimizer"], said["offload.pin_memory"]) == ("cpu", "cpu", False)
    assert "offload.pin_memory" not in fields({"version": 2, "cpu_offload": False, "pin_memory": True})
    refused = read({"sharding_strategy": "NO_SHARD", "cpu_offload": True})["cpu_offload"].effect
    assert refused.fit is Fit.UNSUPPORTED


def test_units_come_from_the_policy_and_its_classes():
    named = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Block, Head"}
    assert fields(named)["sharding.units"] == ["Block", "Head"]
    assert fields({"transformer_layer_cls_to_wrap": ["Block"]})["sharding.units"] == ["Block"]
    assert fields({"auto_wrap_policy": "transformer_based_wrap"})["sharding.units"] == "auto"
    assert fields({"auto_wrap_policy": "NO_WRAP"})["sharding.units"] == "auto"
    sized = fields({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1e8})
    assert (sized["sharding.units"], sized["sharding.min_unit_params"]) == ("auto", 100_000_000)
    assert "sharding.units" not in fields({**named, "sharding_strategy": "NO_SHARD"})
    assert read({"min_num_params": 5})["min_num_params"].effect.fit is Fit.IGNORED


@pytest.mark.parametrize(
    ("torch", "reduced"), [("2.14.1", "bf16"), ("2.15.0", "fp32"), ("3.0", "fp32"), ("not installed", "fp32")]
)
def test_what_fsdp2_reduces_in_depends_on_torch_unless_said(monkeypatch, torch, reduced):
    monkeypatch.setattr("unishard_arguments.fsdp.precision.version_of", lambda package: torch)
    formats = {"param_dtype": "torch.bfloat16"}
    for native in ({"version": 2, "mixed_precision": formats}, {"mixed_precision": formats | {"reduce_dtype": None}}):
        effect = read(native)["mixed_precision.reduce_dtype"].effect
        assert effect.fields == {"precision.reduce": reduced}
        assert "torch 2.15" in effect.note or torch in effect.note
    said = fields({"version": 2, "mixed_precision": formats | {"reduce_dtype": "float16"}})
    assert said["precision.reduce"] == "fp16"
    assert fields({"version": 1, "mixed_precision": formats})["precision.reduce"] == "bf16"
    assert fields({"version": 2, "mixed_precision": {"buffer_dtype": "bfloat16"}}).get("precision.reduce") is None


def test_reductions_are_in_the_dtype_that_is_said():
    said = fields({"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "float32", "buffer_dtype": "float16"}})
    assert (said["precision.compute"], said["precision.reduce"], said["precision.buffers"]) == ("fp16", "fp32", "fp16")
    assert fields({"mixed_precision": "bf16"})["precision.reduce"] == "bf16"
    assert read({"mixed_precision": "PURE"})["mixed_precision"].effect.fit is Fit.UNSUPPORTED


def test_another_format_of_the_output_belongs_to_one_engine():
    formats = {"param_dtype": "bfloat16", "output_dtype": "float32", "cast_forward_inputs": False}
    entries = read({"mixed_precision": formats})
    assert entries["mixed_precision.output_dtype"].effect.native == {"fsdp.mp_policy.output_dtype": "float32"}
    assert entries["mixed_precision.cast_forward_inputs"].effect.fields == {"precision.cast_inputs": False}
    same = read({"mixed_precision": {"param_dtype": "bf16", "output_dtype": "bfloat16"}})[
        "mixed_precision.output_dtype"
    ]
    assert same.effect.fit is Fit.IGNORED


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backward_prefetch", "BACKWARD_POST"),
        ("backward_prefetch", 1),
        ("forward_prefetch", True),
        ("limit_all_gathers", "false"),
        ("use_orig_params", False),
        ("sync_module_states", True),
        ("cpu_ram_efficient_loading", True),
        ("state_dict_type", "FULL_STATE_DICT"),
        ("activation_checkpointing_offload", True),
        ("ignored_modules", None),
        ("xla", False),
        ("mesh", None),
    ],
)
def test_what_changes_no_result_is_dropped(key, value):
    effect = read({"version": 1, key: value})[key].effect
    assert effect.fit is Fit.IGNORED
    assert effect.note


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ignored_modules", ["head"]),
        ("xla", True),
        ("xla_fsdp_settings", {"compute_dtype": "bfloat16"}),
        ("backward_prefetch", "SOON"),
        ("version", 3),
        ("cpu_offload", "maybe"),
        ("auto_wrap_policy", "by taste"),
        ("mixed_precision", "fp8"),
        ("sharding_strategi", "FULL_SHARD"),
    ],
)
def test_what_cannot_be_had_is_refused(key, value):
    effect = read({key: value})[key].effect
    assert effect.fit is Fit.UNSUPPORTED
    assert not effect.fields


@pytest.mark.parametrize(("value", "said"), [(True, "full"), (False, "none"), (["Block"], ["Block"])])
def test_activation_checkpointing(value, said):
    assert fields({"version": 2, "activation_checkpointing": value})["activation_checkpointing"] == said


def test_every_field_has_a_row_in_the_order_of_the_schema():
    assert list(FSDP.rules) == [path for path, _ in leaves(Config)]


@pytest.mark.parametrize("strategy", ["shard_optimizer", "shard_grad_op", "hybrid_shard_grad_op"])
def test_zeros_lower_stages_have_only_a_nearest_neighbor(strategy):
    expressed = FSDP.write(Config.model_validate({"sharding": strategy}), EIGHT)
    assert expressed.document["reshard_after_forward"] is False
    assert expressed.fields["sharding.strategy"].fit is Fit.APPROXIMATE


def test_files_are_refused_and_nothing_of_a_default_is():
    nvme = Config.model_validate({"offload": {"params": "nvme", "optimizer": "nvme", "nvme_path": "/disk"}})
    words = FSDP.write(nvme, EIGHT).fields
    assert {path for path, word in words.items() if word.fit is Fit.UNSUPPORTED} == {
        "offload.params",
        "offload.optimizer",
        "offload.nvme_path",
    }
    defaults = FSDP.write(Config(), EIGHT)
    assert defaults.document == {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    assert all(word.fit is not Fit.UNSUPPORTED for word in defaults.fields.values())


@pytest.mark.parametrize("group", [None, 4])
def test_groups_need_the_number_of_ranks(group):
    cfg = Config.model_validate({"sharding": {"strategy": "hybrid_shard", "group_size": group}})
    assert FSDP.write(cfg, EIGHT).document["mesh"] == {"replicate": 2, "shard": 4}
    alone = FSDP.write(cfg, Topology())
    assert alone.fields["sharding.strategy"].fit is Fit.NEEDS_INPUT
    assert "--world-size" in alone.fields["sharding.strategy"].note
    assert alone.document.get("mesh", {}).get("shard") != 1


def test_a_native_policy_comes_along():
    cfg = Config.model_validate({"precision": "bf16", "native": {"fsdp": {"mp_policy": {"output_dtype": "float32"}}}})
    expressed = FSDP.write(cfg, EIGHT)
    assert expressed.document["mixed_precision"]["output_dtype"] == "float32"
    other = Config.model_validate({"native": {"fsdp": {"requires_gradient_sync": "last_micro_batch"}}})
    assert FSDP.write(other, EIGHT).fields["native"].fit is Fit.NEEDS_INPUT


@st.composite
def expressible(draw):
    """Configs that FSDP2's arguments can say."""
    said = {"backend": "fsdp", "precision.compute": draw(st.sampled_from(["fp32", "bf16", "fp16"]))}
    said["precision.reduce"] = draw(st.sampled_from(["fp32", said["precision.compute"]]))
    said["sharding.strategy"] = draw(st.sampled_from(["no_shard", "full_shard", "hybrid_shard"]))
    said["activation_checkpointing"] = draw(st.sampled_from(["none", "full"]))
    if said["activation_checkpointing"] == "full":
        said["offload.activations"] = draw(st.sampled_from(["none", "cpu"]))
    if said["sharding.strategy"] == "hybrid_shard":
        said["sharding.group_size"] = draw(st.sampled_from([2, 4]))
    if said["sharding.strategy"] != "no_shard":
        said["sharding.reshard_after_forward"] = draw(st.booleans())
        said["sharding.units"] = draw(st.sampled_from(["auto", ["Block"], ["Block", "Head"]]))
        if draw(st.booleans()):
            said |= {"offload.params": "cpu", "offload.optimizer": "cpu", "offload.pin_memory": draw(st.booleans())}
        if said["sharding.units"] == "auto":
            said["sharding.min_unit_params"] = draw(st.integers(0, 10**9))
    return Config.model_validate(nested(said))


@settings(deadline=None)
@given(expressible())
def test_what_the_arguments_can_say_comes_back(cfg):
    native = FSDP.write(cfg, EIGHT).document
    assert Config.model_validate(nested(fields(native, topology=EIGHT))) == cfg
