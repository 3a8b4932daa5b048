"""What a config becomes as the JSON of `deepspeed.initialize`, what the report says of it, and which native keys are
let in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from unishard.config import Config, leaves
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.report import Line, Translation
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, TranslationError
from unishard_deepspeed import backend
from unishard_deepspeed.keys import ROWS, Use, used

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"]
PRECISIONS = ["fp32", "bf16", {"compute": "bf16", "reduce": "bf16"}, "fp16"]


def translate(world: int = 2, **sections: Any) -> Translation:
    return backend.translate(Config.model_validate(sections), Topology(world_size=world, local_world_size=world))


def line(translation: Translation, path: str) -> Line:
    return next(line for line in translation.report if line.path == path)


def problems(native: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        translate(native={"deepspeed": native})
    return {problem.path.removeprefix("native.deepspeed."): problem.what for problem in caught.value.problems}


def test_every_field_has_a_rule_in_the_order_of_the_schema() -> None:
    assert list(backend.rules) == [path for path, _ in leaves(Config)]


@pytest.mark.parametrize(("strategy", "stage"), list(zip(STRATEGIES, range(4), strict=True)))
def test_a_strategy_is_a_stage(strategy: str, stage: int) -> None:
    assert translate(sharding=strategy).native["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, PRECISIONS)))
def test_by_default_nothing_is_approximate(strategy: str, precision: Any) -> None:
    translation = translate(sharding=strategy, precision=precision)
    assert translation.check(strict=True) is translation


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_masters_are_deepspeeds_own_or_the_models_parameters(strategy: str, dtype: str) -> None:
    translation = translate(sharding=strategy, precision={"compute": dtype, "master": dtype})
    native = translation.native
    if strategy == "no_shard":
        translation.check(strict=True)
        assert not native["bf16"]["enabled"]
        assert not native["fp16"]["enabled"]
        assert native["data_types"]["grad_accum_dtype"] == native["data_types"]["param_dtype"] == "fp32"
    elif dtype == "bf16":
        translation.check(strict=True)
        assert native["bf16"]["bf16_master_weights_and_grads"] is native["bf16"]["bf16_optimizer_states"] is True
        assert native["data_types"]["grad_accum_dtype"] == "bf16"
    else:
        with pytest.raises(
            TranslationError, match=r"precision\.master: 'fp16' is not supported by deepspeed: .*; write fp32"
        ):
            translation.check(strict=False)


def test_offloaded_bf16_masters_are_refused() -> None:
    translation = translate(
        sharding="shard_grad_op", precision={"compute": "bf16", "master": "bf16"}, offload={"optimizer": "cpu"}
    )
    with pytest.raises(TranslationError, match=r"precision\.master.*offload.optimizer to none"):
        translation.check(strict=False)


def test_deepspeeds_own_loss_scale_is_off() -> None:
    native = translate(precision={"compute": "fp16", "loss_scale": 128}).native
    assert native["fp16"] == {
        "enabled": True,
        "loss_scale": 1.0,
        "auto_cast": False,
        "fp16_master_weights_and_grads": False,
    }
    assert native["data_types"]["grad_accum_dtype"] == native["communication_data_type"] == "fp32"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_accumulation_is_written(strategy: str) -> None:
    translation = translate(sharding=strategy, precision={"compute": "fp16", "accumulate": "fp16"}).check(strict=True)
    assert translation.native["data_types"]["grad_accum_dtype"] == "fp16"


def test_what_decides_the_maths_is_always_written() -> None:
    native = dict(flat(translate(training={"micro_batch_size": 3, "gradient_accumulation_steps": 5}).native))
    assert native["train_batch_size"] == 30
    assert native["train_micro_batch_size_per_gpu"] == 3
    assert native["gradient_accumulation_steps"] == 5
    assert native["gradient_clipping"] == 0.0
    assert native["managed_gradient_accumulation"] is False
    assert native["communication_data_type"] == native["data_types.grad_accum_dtype"] == "fp32"
    assert native["zero_optimization.memory_efficient_linear"] is False
    assert native["zero_optimization.stage3_param_persistence_threshold"] == 0
    assert native["zero_optimization.overlap_comm"] is True
    assert native["fp16.enabled"] is native["bf16.enabled"] is False


def test_there_is_no_optimizer_block_for_deepspeed_to_build() -> None:
    native = translate(optimizer={"name": "sgd"}, scheduler={"name": "cosine", "total_steps": 10}).native
    assert not {"optimizer", "scheduler"} & native.keys()


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_bf16_reduces_as_asked_and_accumulates_in_fp32(reduce: str) -> None:
    native = translate(precision={"compute": "bf16", "reduce": reduce}).native
    assert native["communication_data_type"] == reduce
    assert native["data_types"]["grad_accum_dtype"] == "fp32"
    assert native["bf16"]["enabled"] is native["bf16"]["check_grad_overflow"] is True


def test_resharding_is_the_reuse_distance() -> None:
    dropped = translate(communication={"prefetch_bucket_size": 7}).native["zero_optimization"]
    kept = translate(sharding={"reshard_after_forward": False}).native["zero_optimization"]
    assert (dropped["stage3_max_reuse_distance"], dropped["stage3_max_live_parameters"]) == (0, 7)
    assert kept["stage3_max_reuse_distance"] == kept["stage3_max_live_parameters"] == 10**15


def test_a_number_is_a_second_copy_in_groups_of_so_many_ranks() -> None:
    sharding = {"reshard_after_forward": 4}
    translation = translate(8, sharding=sharding).check(strict=True)
    assert translation.native["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert translation.native["zero_optimization"]["stage3_max_reuse_distance"] == 0
    assert line(translation, "sharding.reshard_after_forward").fit is Fit.EQUIVALENT
    assert translate(4, sharding=sharding).native["zero_optimization"]["zero_hpz_partition_size"] == 1
    for sections, instead in (
        ({"sharding": sharding | {"strategy": "hybrid_shard", "group_size": 8}}, "write true or false, or full_shard"),
        (
            {"sharding": sharding, "offload": {"params": "nvme", "nvme_path": "/local"}, "precision": "bf16"},
            "set offload.params to cpu",
        ),
    ):
        with pytest.raises(
            TranslationError, match=rf"sharding\.reshard_after_forward: 4 is not supported by deepspeed: .*{instead}"
        ):
            translate(8, **sections).check(strict=False)


@pytest.mark.parametrize(
    ("world", "size", "sections", "what"),
    [
        (4, 3, {}, "is 3, which does not divide the 4 ranks; write 2 or 1"),
        (5, 2, {}, "is 2, which does not divide the 5 ranks; write 1"),
        (
            4,
            2,
            {"sharding": {"reshard_after_forward": 2}},
            "decided by sharding.reshard_after_forward, which is 2; remove one of the two",
        ),
        (
            4,
            2,
            {"offload": {"params": "nvme", "nvme_path": "/local"}, "precision": "bf16"},
            "remove it, or set offload.params to cpu",
        ),
    ],
)
def test_a_second_copy_that_cannot_be_is_one_clear_error(
    world: int, size: int, sections: dict[str, Any], what: str
) -> None:
    own = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": size}}}
    with pytest.raises(ConfigError) as caught:
        translate(world, native=own, **sections)
    (problem,) = caught.value.problems
    assert problem.path == "native.deepspeed.zero_optimization.zero_hpz_partition_size"
    assert problem.what.endswith(what)


def test_deepcompile_is_refused_on_every_device_and_the_reason_is_said() -> None:
    found = problems({"compile": {"deepcompile": True}})
    assert list(found) == ["compile"]
    assert "managed_gradient_accumulation: false" in found["compile"]
    assert found["compile"].endswith("remove it, and set compile.mode to per_block for torch.compile")


def test_nothing_is_kept_for_backward_without_prefetching() -> None:
    translation = translate(communication={"prefetch_bucket_size": 0})
    zero = translation.native["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == zero["stage3_max_live_parameters"] == 0
    assert line(translation, "sharding.reshard_after_forward").fit is Fit.EXACT


def test_units_are_leaf_modules_and_never_deepspeeds_own_list() -> None:
    assert translate().native["zero_optimization"]["leaf_module"] == {"classes": [], "names": [], "name_suffixes": []}
    named = translate(sharding={"units": ["LlamaDecoderLayer"]}).native
    assert named["zero_optimization"]["leaf_module"]["classes"] == ["LlamaDecoderLayer"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepspeeds_own_list_is_written_over_at_every_stage(strategy: str) -> None:
    assert translate(sharding=strategy).native["zero_optimization"]["leaf_module"] == {
        "classes": [],
        "names": [],
        "name_suffixes": [],
    }


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer"])
def test_no_overlap_where_deepspeed_refuses_it(strategy: str) -> None:
    translation = translate(sharding=strategy)
    assert translation.native["zero_optimization"]["overlap_comm"] is False
    assert line(translation, "communication.overlap").fit is Fit.EQUIVALENT


def test_offload_says_what_the_config_says() -> None:
    zero = translate(offload="cpu").native["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    only = translate(offload={"optimizer": "cpu", "pin_memory": False}).native["zero_optimization"]
    assert (only["offload_param"], only["offload_optimizer"]) == (None, {"device": "cpu", "pin_memory": False})


def test_what_is_kept_in_fp32_is_not_offloaded_where_deepspeed_would_round_it() -> None:
    kept = {"compute": "bf16", "keep_fp32": ["norm"]}
    for offload, strategy, place in (
        ("cpu", "full_shard", "params"),
        ({"optimizer": "cpu"}, "shard_grad_op", "optimizer"),
    ):
        with pytest.raises(
            TranslationError, match=f"precision.keep_fp32: .*would round what is kept.*set offload.{place} to none"
        ):
            translate(precision=kept, sharding=strategy, offload=offload).check(strict=False)
        translate(precision="bf16", sharding=strategy, offload=offload).check(strict=False)
    translate(precision=kept, sharding="full_shard", offload={"optimizer": "cpu"}).check(strict=False)


def test_files_are_for_parameters_alone() -> None:
    place = {"device": "nvme", "pin_memory": True, "nvme_path": "/local"}
    offload = {"params": "nvme", "optimizer": "cpu", "nvme_path": "/local"}
    translation = translate(offload=offload, precision="bf16").check(strict=True)
    assert translation.native["zero_optimization"]["offload_param"] == place
    assert line(translation, "offload.params").fit is Fit.EQUIVALENT
    with pytest.raises(
        TranslationError, match=r"offload\.optimizer: 'nvme' is not supported by deepspeed: .*; choose cpu"
    ):
        translate(offload=offload | {"optimizer": "nvme"}).check(strict=False)


@pytest.mark.parametrize(
    ("strategy", "within"), [("hybrid_shard", "full_shard"), ("hybrid_shard_grad_op", "shard_grad_op")]
)
def test_hybrid_is_the_plain_strategy_among_the_ranks_of_a_group(strategy: str, within: str) -> None:
    nodes = Topology(world_size=8, local_world_size=4)
    hybrid = backend.translate(
        Config.model_validate({"sharding": {"strategy": strategy, "group_size": 2}}), nodes
    ).check(strict=True)
    assert hybrid.native == translate(2, sharding=within).native
    assert line(hybrid, "sharding.strategy").fit is Fit.EQUIVALENT
    assert "MiCS" in line(hybrid, "sharding.strategy").note


def test_groups_of_deepspeeds_own_are_refused_beside_those_of_the_strategy() -> None:
    own = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
    assert (
        line(translate(native=own), "native.deepspeed.zero_optimization.zero_hpz_partition_size").fit is Fit.EQUIVALENT
    )
    with pytest.raises(
        ConfigError, match="zero_hpz_partition_size: makes groups of its own beside those of hybrid_shard; remove it"
    ):
        translate(sharding="hybrid_shard", native=own)


def test_the_native_config_is_json() -> None:
    native = translate(offload="cpu", precision="bf16", training={"gradient_clipping": 0.5}).native
    assert json.loads(json.dumps(native)) == native


def test_an_override_is_merged_last_and_listed() -> None:
    translation = translate(native={"deepspeed": {"zero_optimization": {"sub_group_size": 9}, "log_level": "error"}})
    assert translation.native["zero_optimization"]["sub_group_size"] == 9
    assert translation.native["zero_optimization"]["stage"] == 3
    listed = {line.path: line.value for line in translation.report if line.path.startswith("native.")}
    assert listed == {"native.deepspeed.zero_optimization.sub_group_size": 9, "native.deepspeed.log_level": "error"}


@pytest.mark.parametrize(
    "native",
    [
        {"zero_optimization": {"zero_quantized_gradients": True}},
        {"zero_optimization": {"zero_quantized_weights": True}},
        {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
    ],
    ids=lambda native: next(key for key, _ in flat(native)),
)
def test_an_override_that_may_train_something_else_is_approximate(native: dict[str, Any]) -> None:
    translation = translate(native={"deepspeed": native})
    (path, _), *_ = flat(native)
    assert line(translation, f"native.deepspeed.{path}").fit is Fit.APPROXIMATE
    assert translation.check(strict=False) is translation
    with pytest.raises(TranslationError, match=f"native.deepspeed.{path}: .*only DeepSpeed has this setting"):
        translation.check(strict=True)


@pytest.mark.parametrize(
    "native",
    [
        {"zero_optimization": {"sub_group_size": 9, "allgather_bucket_size": 9, "contiguous_gradients": False}},
        {
            "zero_optimization": {
                "memory_efficient_linear": True,
                "parameter_alignment": True,
                "override_module_apply": False,
            }
        },
        {"zero_optimization": {"ignore_unused_parameters": False, "zero_hpz_partition_size": 2}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "bf16": {"immediate_grad_update": True}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"wall_clock_breakdown": True, "comms_logger": {"enabled": True}, "timers": {"throughput": {"enabled": True}}},
        {"vocabulary_size": 32000, "steps_per_print": None},
    ],
)
def test_an_override_about_memory_time_or_logs_passes_strict(native: dict[str, Any]) -> None:
    translation = translate(native={"deepspeed": native}).check(strict=True)
    fits = {line.path: line.fit for line in translation.report if line.path.startswith("native.deepspeed.")}
    assert fits == {f"native.deepspeed.{key}": Fit.EQUIVALENT for key, _ in flat(native)}


def test_overrides_of_another_backend_are_left_alone() -> None:
    assert translate(native={"fsdp": {"nonsense": 1}}).native == translate().native


@pytest.mark.parametrize(
    ("native", "path", "words"),
    [
        (
            {"gradient_cliping": 1.0},
            "gradient_cliping",
            "did you mean 'gradient_clipping', which training.gradient_clipping decides",
        ),
        (
            {"zero_optimization": {"sub_group_sise": 1}},
            "zero_optimization.sub_group_sise",
            "did you mean 'sub_group_size'",
        ),
        ({"sub_group_size": 1}, "sub_group_size", "did you mean 'zero_optimization.sub_group_size'"),
        ({"frobnicate": 1}, "frobnicate", "unknown to DeepSpeed"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "training.gradient_clipping"),
        ({"optimizer": {"type": "Adam"}}, "optimizer", "set optimizer instead"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "sharding.strategy"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            "offload.params",
        ),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients", "corrupts"),
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation", "end of an accumulation window"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast", "precision.compute"),
        ({"amp": {"enabled": False}}, "amp", "was removed in DeepSpeed"),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "zero_optimization.mics_shard_size",
            "was removed in DeepSpeed",
        ),
        ({"dataloader_drop_last": True}, "dataloader_drop_last", "use unishard.dataloader"),
        ({"zero_optimization": True}, "zero_optimization", "must be a mapping"),
        ({"zero_optimization": {"sub_group_size": True}}, "zero_optimization.sub_group_size", "must be int, got bool"),
        ({"zero_optimization": {"sub_group_size": -1}}, "zero_optimization.sub_group_size", "of at least 0, got -1"),
        ({"wall_clock_breakdown": "auto"}, "wall_clock_breakdown", "must be bool, got str"),
        ({"steps_per_print": "never"}, "steps_per_print", "must be int or null, got str"),
        ({"tensorboard": {"enable": True}}, "tensorboard", "must have no key 'enable'"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "data_types.keep_in_fp32_modules", "precision.keep_fp32"),
    ],
)
def test_a_native_key_that_cannot_be_taken_is_refused(native: dict[str, Any], path: str, words: str) -> None:
    found = problems(native)
    assert list(found) == [path]
    assert words in found[path]


def test_all_native_problems_are_told_at_once() -> None:
    assert len(problems({"amp": {}, "stage": 3, "bf16": {"enabled": True}})) == 3


def test_translating_imports_neither_torch_nor_deepspeed() -> None:
    code = """
import sys
from unishard_deepspeed import backend
from unishard.config import Config
from unishard.config.topology import Topology
backend.translate(Config(), Topology())
sys.exit(bool({"torch", "deepspeed"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -- against the installed DeepSpeed
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    from unishard_deepspeed.start import quiet

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        import deepspeed

        return deepspeed


def known(block: str) -> set[str]:
    """Keys of one block in our tables, without what DeepSpeed has removed and without what lies deeper."""
    written = (key for key, _ in flat(translate(precision="bf16", offload="cpu").native))
    keys = {*(ROWS.keys() - used(Use.REMOVED).keys()), *written}
    inside = {key[len(block) + 1 :] if block else key for key in keys if key.startswith(f"{block}." if block else "")}
    return {key.split(".")[0] for key in inside}


@pytest.mark.parametrize(
    ("block", "module", "model"),
    [
        ("zero_optimization", "runtime.zero.config", "DeepSpeedZeroConfig"),
        ("zero_optimization.offload_param", "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        ("zero_optimization.offload_optimizer", "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
        ("bf16", "runtime.precision_config", "DeepSpeedBF16Config"),
        ("fp16", "runtime.precision_config", "DeepSpeedFP16Config"),
    ],
)
def test_the_keys_of_a_block_are_those_that_deepspeed_validates(
    deepspeed: Any, block: str, module: str, model: str
) -> None:
    fields = getattr(sys.modules[f"deepspeed.{module}"], model).model_fields
    assert known(block) == {field.alias or name for name, field in fields.items()}


def test_the_removed_keys_are_deepspeeds(deepspeed: Any) -> None:
    config = sys.modules["deepspeed.runtime.config"]
    theirs = {
        *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS),
    }
    assert used(Use.REMOVED).keys() == theirs


class Recorder(dict[str, Any]):
    """Remembers which keys are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __copy__(self) -> Recorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        recorder = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Any:
                return iter(list(recorder))

        return Keys()


def test_every_top_level_key_that_deepspeed_reads_is_known(deepspeed: Any) -> None:
    native = Recorder(translate(world=1).native)
    deepspeed.DeepSpeedConfig(native)
    assert len(native.read) > 40
    assert native.read - known("") - used(Use.REMOVED).keys() == set()


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, PRECISIONS)))
def test_deepspeed_takes_the_json(deepspeed: Any, strategy: str, precision: Any) -> None:
    translation = translate(world=1, sharding=strategy, precision=precision, training={"gradient_clipping": 0.5})
    config = deepspeed.DeepSpeedConfig(translation.native)
    assert config.zero_optimization_stage == STRATEGIES.index(strategy)
    assert config.gradient_clipping == 0.5
    assert config.bfloat16_config.enabled == (precision not in ("fp32", "fp16"))
    assert config.float16_config.enabled == (precision == "fp16")
    assert not config.managed_gradient_accumulation
