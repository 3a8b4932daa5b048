"""Lightning's arguments say what Lightning would do, and are written so that they can be read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.config import Config, leaves, value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import translating
from unishard.formats.items import Item
from unishard.formats.lightning import FORMAT
from unishard.formats.lightning.keys import TRAINER
from unishard.formats.reading import ReadDocument
from unishard.formats.translating import Outcome

BLOCK = "torch.nn.modules.transformer.TransformerEncoderLayer"


def read(document: dict[str, Any], *overrides: str) -> ReadDocument:
    return translating.read(document, "lightning", overrides)


def config(document: dict[str, Any]) -> Config:
    return read(document).config


def item(document: dict[str, Any], key: str, to: str = "unishard") -> Item:
    outcome = translating.translate(document, to, from_="lightning")
    return next(item for item in outcome.items if item.key == key)


def built(name: str, *, package: str = "lightning.pytorch.strategies", **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{package}.{name}", "init_args": arguments}


# Which strategy, and where it stands.


@pytest.mark.parametrize(
    ("name", "backend", "strategy", "offload"),
    [
        ("auto", "fsdp", "no_shard", ("none", "none")),
        ("ddp", "fsdp", "no_shard", ("none", "none")),
        ("ddp_find_unused_parameters_true", "fsdp", "no_shard", ("none", "none")),
        ("ddp_notebook", "fsdp", "no_shard", ("none", "none")),
        ("fsdp", "fsdp", "full_shard", ("none", "none")),
        ("FSDP", "fsdp", "full_shard", ("none", "none")),
        ("fsdp_cpu_offload", "fsdp", "full_shard", ("cpu", "cpu")),
        ("deepspeed", "deepspeed", "shard_grad_op", ("none", "none")),
        ("deepspeed_stage_1", "deepspeed", "shard_optimizer", ("none", "none")),
        ("deepspeed_stage_1_offload", "deepspeed", "shard_optimizer", ("none", "cpu")),
        ("deepspeed_stage_2_offload", "deepspeed", "shard_grad_op", ("none", "cpu")),
        ("deepspeed_stage_3", "deepspeed", "full_shard", ("none", "none")),
        ("deepspeed_stage_3_offload", "deepspeed", "full_shard", ("cpu", "cpu")),
        ("deepspeed_stage_3_offload_nvme", "deepspeed", "full_shard", ("nvme", "nvme")),
    ],
)
def test_a_registered_name_is_what_it_stands_for(
    name: str, backend: str, strategy: str, offload: tuple[str, str]
) -> None:
    cfg = config({"strategy": name})
    assert (cfg.backend, cfg.sharding.strategy, (cfg.offload.params, cfg.offload.optimizer)) == (
        backend,
        strategy,
        offload,
    )
    if offload[1] == "nvme":
        assert cfg.offload.nvme_path == "/local_nvme"


@pytest.mark.parametrize(
    "document",
    [
        {"strategy": built("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"), "precision": "bf16-true"},
        {"trainer": {"strategy": built("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"), "precision": "bf16-true"}},
        {
            "fit": {
                "trainer": {
                    "strategy": built("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"),
                    "precision": "bf16-true",
                }
            }
        },
        {**built("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"), "precision": "bf16-true"},
        {"class_path": "FSDPStrategy", "dict_kwargs": {"sharding_strategy": "SHARD_GRAD_OP"}, "precision": "bf16-true"},
        {
            "_target_": "lightning.pytorch.strategies.FSDPStrategy",
            "sharding_strategy": "SHARD_GRAD_OP",
            "precision": "bf16-true",
        },
        {
            "trainer": {
                "_target_": "lightning.pytorch.Trainer",
                "strategy": {
                    "_target_": "lightning.pytorch.strategies.FSDPStrategy",
                    "sharding_strategy": "SHARD_GRAD_OP",
                },
                "precision": "bf16-true",
            }
        },
        {"fabric": {"strategy": built("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"), "precision": "bf16-true"}},
    ],
)
def test_every_place_for_a_strategy_is_found(document: dict[str, Any]) -> None:
    outcome = translating.translate(document, "unishard", from_="lightning")
    cfg = outcome.reading.config
    assert (cfg.sharding.strategy, cfg.sharding.reshard_after_forward) == ("full_shard", False)
    assert (cfg.precision.compute, cfg.precision.master) == ("bf16", "bf16")
    assert outcome.status(strict=False) == 0


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("dp", "write ddp"),
        ("xla_fsdp", "CUDA devices and CPUs"),
        ("deepspeed_stage3", "did you mean 'deepspeed_stage_3'?"),
        ("ddp_sharded", "deepspeed_stage_2"),
        (built("FSDPStrategie"), "did you mean 'FSDPStrategy'?"),
        (7, "class_path and init_args"),
    ],
)
def test_a_strategy_that_cannot_be_had_is_refused_with_what_instead(value: Any, hint: str) -> None:
    refused = translating.translate({"strategy": value}, "unishard", from_="lightning").of(Fit.UNSUPPORTED)
    assert len(refused) == 1
    assert hint in refused[0].note


def test_a_name_of_lightning_1_is_translated_and_named() -> None:
    found = item({"strategy": "fsdp_native"}, "strategy")
    assert found.fit is Fit.EQUIVALENT
    assert "calls it fsdp" in found.note


# FSDPStrategy.


def test_every_argument_of_fsdp_strategy_has_a_meaning() -> None:
    arguments = {
        "sharding_strategy": "HYBRID_SHARD",
        "device_mesh": [2, 4],
        "cpu_offload": {"class_path": "torch.distributed.fsdp.CPUOffload", "init_args": {"offload_params": True}},
        "mixed_precision": {
            "class_path": "torch.distributed.fsdp.MixedPrecision",
            "init_args": {"param_dtype": "torch.bfloat16", "reduce_dtype": "torch.float32"},
        },
        "auto_wrap_policy": [BLOCK],
        "activation_checkpointing_policy": [BLOCK],
        "state_dict_type": "sharded",
        "backward_prefetch": "BackwardPrefetch.BACKWARD_POST",
        "forward_prefetch": True,
        "limit_all_gathers": False,
        "sync_module_states": True,
        "use_orig_params": False,
        "ignored_modules": None,
        "process_group_backend": "nccl",
        "timeout": "0:10:00",
    }
    outcome = translating.translate({"strategy": built("FSDPStrategy", **arguments)}, "unishard", from_="lightning")
    assert outcome.of(Fit.UNSUPPORTED) == []
    keys = [item.key for item in outcome.items if not item.assumed]
    assert sorted(keys) == sorted(["strategy.class_path", *(f"strategy.init_args.{name}" for name in arguments)])
    cfg = outcome.reading.config
    assert (cfg.sharding.strategy, cfg.sharding.group_size) == ("hybrid_shard", 4)
    assert cfg.sharding.units == cfg.activation_checkpointing == ["TransformerEncoderLayer"]
    assert (cfg.precision.compute, cfg.precision.reduce, cfg.precision.master) == ("bf16", "fp32", "fp32")
    assert cfg.offload.params == cfg.offload.optimizer == "cpu"


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        (
            {"class_path": "torch.distributed.fsdp.wrap.ModuleWrapPolicy", "init_args": {"module_classes": [BLOCK]}},
            "units",
            ["TransformerEncoderLayer"],
        ),
        (BLOCK, "units", ["TransformerEncoderLayer"]),
        (
            {
                "class_path": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
                "init_args": {"min_num_params": 5000},
            },
            "min_unit_params",
            5000,
        ),
        ("torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", "min_unit_params", 100_000_000),
    ],
)
def test_a_wrap_policy_names_units_or_their_size(policy: Any, field: str, value: Any) -> None:
    assert value_at(config({"strategy": built("FSDPStrategy", auto_wrap_policy=policy)}), f"sharding.{field}") == value


def test_the_two_flavours_of_fsdp_strategy_write_other_checkpoints() -> None:
    for package, files in (("lightning.pytorch.strategies", "full"), ("lightning.fabric.strategies", "sharded")):
        found = item({"strategy": built("FSDPStrategy", package=package)}, "strategy.init_args.state_dict_type")
        assert (found.value, found.assumed) == (files, True)


def test_a_policy_of_code_is_refused_with_what_instead() -> None:
    found = item(
        {"strategy": built("FSDPStrategy", auto_wrap_policy="my.code.policy")}, "strategy.init_args.auto_wrap_policy"
    )
    assert found.fit is Fit.UNSUPPORTED
    assert "write the classes" in found.note


def test_a_misspelt_argument_is_refused_with_the_right_one() -> None:
    for strategy, wrong, right in (
        ("FSDPStrategy", "shardingstrategy", "sharding_strategy"),
        ("DeepSpeedStrategy", "sub_group_sise", "sub_group_size"),
        ("DDPStrategy", "find_unused_parameter", "find_unused_parameters"),
    ):
        found = item({"strategy": built(strategy, **{wrong: 1})}, f"strategy.init_args.{wrong}")
        assert found.fit is Fit.UNSUPPORTED
        assert repr(right) in found.note


# Precision.


@pytest.mark.parametrize("word", ["bf16-mixed", "bf16"])
def test_bf16_mixed_is_not_the_same_under_each_strategy(word: str) -> None:
    formats = {
        name: tuple(
            value_at(config({"strategy": name, "precision": word}).precision, field)
            for field in ("compute", "master", "reduce")
        )
        for name in ("ddp", "fsdp", "deepspeed")
    }
    assert formats == {
        "ddp": ("bf16", "fp32", "fp32"),
        "fsdp": ("bf16", "fp32", "bf16"),
        "deepspeed": ("bf16", "fp32", "bf16"),
    }
    assert "autocast" in item({"strategy": "fsdp", "precision": word}, "precision").note


def test_true_half_precision_has_no_masters_on_fsdp_and_keeps_them_on_deepspeed() -> None:
    assert config({"strategy": "fsdp", "precision": "bf16-true"}).precision.master == "bf16"
    assert config({"strategy": "deepspeed_stage_3", "precision": "bf16-true"}).precision.master == "fp32"
    assert config({"strategy": "ddp", "precision": "16-true"}).precision.loss_scale == 1.0


def test_own_formats_of_the_strategy_count_more_than_the_word() -> None:
    formats = {
        "class_path": "torch.distributed.fsdp.MixedPrecision",
        "init_args": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    }
    precision = config(
        {"strategy": built("FSDPStrategy", mixed_precision=formats), "precision": "bf16-mixed"}
    ).precision
    assert (precision.compute, precision.reduce, precision.master) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize(
    ("word", "why"), [("64-true", "double"), ("transformer-engine", "FP8"), ("bf17", "must be one of")]
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_formats_that_no_engine_has_are_refused(word: str, why: str, strategy: str) -> None:
    found = item({"strategy": strategy, "precision": word}, "precision")
    assert found.fit is Fit.UNSUPPORTED
    assert why in found.note


# DeepSpeedStrategy.


def test_the_defaults_of_deepspeed_strategy_are_not_deepspeeds() -> None:
    cfg = config({"strategy": built("DeepSpeedStrategy", offload_optimizer=True)})
    assert cfg.sharding.strategy == "shard_grad_op"
    assert cfg.offload.pin_memory is False
    assert cfg.communication.reduce_bucket_size == 200_000_000
    assert cfg.native["deepspeed"]["zero_optimization"]["sub_group_size"] == 10**12


def test_the_trainer_writes_no_clipping_and_fabric_leaves_deepspeeds_own() -> None:
    assert config({"strategy": "deepspeed"}).training.gradient_clipping is None
    assert config({"strategy": "deepspeed", "gradient_clip_val": 0.5}).training.gradient_clipping == 0.5
    assert (
        config(
            {"strategy": built("DeepSpeedStrategy", package="lightning.fabric.strategies")}
        ).training.gradient_clipping
        == 1.0
    )


def test_a_config_inside_replaces_the_arguments_and_wins_over_the_trainer() -> None:
    inside = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.3, "gradient_accumulation_steps": 4}
    document = {"strategy": built("DeepSpeedStrategy", stage=1, config=inside), "gradient_clip_val": 1.0}
    cfg = config(document)
    assert (cfg.sharding.strategy, cfg.training.gradient_clipping, cfg.training.gradient_accumulation_steps) == (
        "full_shard",
        0.3,
        4,
    )
    assert item(document, "strategy.init_args.stage").fit is Fit.IGNORED
    assert "not used" in item(document, "gradient_clip_val").note
    refused_there = item(document, "strategy.init_args.config.gradient_accumulation_steps")
    assert "accumulate_grad_batches" in refused_there.note


def test_a_config_in_a_file_is_read_beside_the_document(tmp_path: Any) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "lightning.yaml"
    path.write_text("strategy:\n  class_path: DeepSpeedStrategy\n  init_args: {config: zero.json}\n")
    assert translating.read(path).config.sharding.strategy == "shard_optimizer"
    (tmp_path / "zero.json").unlink()
    refused = translating.translate(path, "unishard").of(Fit.UNSUPPORTED)
    assert [found.key for found in refused] == ["strategy.init_args.config"]
    assert "put the file beside" in refused[0].note


def test_arguments_without_effect_are_dropped_with_the_reason() -> None:
    document = {
        "strategy": built("DeepSpeedStrategy", offload_optimizer_device="nvme", nvme_path="/disk", thread_count=4)
    }
    for name in ("offload_optimizer_device", "nvme_path", "thread_count"):
        assert item(document, f"strategy.init_args.{name}").fit is Fit.IGNORED
    assert config(document).offload.optimizer == "none"


# The Trainer's other arguments.


def test_clipping_with_fsdp_names_that_lightning_refuses_it() -> None:
    found = item({"strategy": "fsdp", "gradient_clip_val": 1.0}, "gradient_clip_val")
    assert (found.fit, found.becomes) == (Fit.EQUIVALENT, "training.gradient_clipping")
    assert "cannot clip by norm" in found.note


def test_clipping_each_value_is_refused() -> None:
    document = {"strategy": "ddp", "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    assert item(document, "gradient_clip_val").fit is Fit.UNSUPPORTED
    assert config(document).training.gradient_clipping is None


@pytest.mark.parametrize(
    ("devices", "nodes", "world"),
    [(4, 2, 8), ("2", 1, 2), ([0, 2, 3], 1, 3), ("0,1", 1, 2), ("auto", 2, None), (-1, 1, None)],
)
def test_devices_and_nodes_say_how_many_ranks(devices: Any, nodes: int, world: int | None) -> None:
    found = read({"strategy": "fsdp", "devices": devices, "num_nodes": nodes}).topology
    assert (found.world_size if found else None) == world


@pytest.mark.parametrize(
    ("argument", "value", "fit"),
    [
        ("logger", {"class_path": "lightning.pytorch.loggers.CometLogger"}, Fit.IGNORED),
        ("sync_batchnorm", True, Fit.NEEDS_INPUT),
        ("sync_batchnorm", False, Fit.IGNORED),
        ("deterministic", "warn", Fit.NEEDS_INPUT),
        ("benchmark", True, Fit.IGNORED),
        ("max_steps", 1000, Fit.NEEDS_INPUT),
        ("max_steps", -1, Fit.IGNORED),
        ("limit_val_batches", 0.1, Fit.IGNORED),
        ("callbacks", [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}], Fit.IGNORED),
        ("callbacks", [{"class_path": "StochasticWeightAveraging", "init_args": {"swa_lrs": 0.1}}], Fit.NEEDS_INPUT),
        ("plugins", [{"class_path": "lightning.pytorch.plugins.BitsandbytesPrecision"}], Fit.UNSUPPORTED),
        ("plugins", [{"class_path": "lightning.pytorch.plugins.environments.SLURMEnvironment"}], Fit.IGNORED),
        ("accelerator", "tpu", Fit.UNSUPPORTED),
        ("accelerator", "cuda", Fit.IGNORED),
        ("max_stepz", 3, Fit.UNSUPPORTED),
        ("accumulate_grad_batches", "often", Fit.UNSUPPORTED),
    ],
)
def test_other_arguments_concern_the_launcher_the_script_or_nothing(argument: str, value: Any, fit: Fit) -> None:
    assert item({"trainer": {"strategy": "fsdp", argument: value}}, f"trainer.{argument}").fit is fit


def test_model_parallel_strategy_is_fsdp_only_without_tensor_parallelism() -> None:
    assert (
        item({"strategy": built("ModelParallelStrategy")}, "strategy.init_args.tensor_parallel_size").fit
        is Fit.UNSUPPORTED
    )
    sharded = {"strategy": built("ModelParallelStrategy", data_parallel_size=8, tensor_parallel_size=1)}
    assert config(sharded).sharding.strategy == "full_shard"
    assert item(sharded, "strategy.init_args.data_parallel_size").fit is Fit.APPROXIMATE


def test_sections_of_lightning_cli_say_seed_optimizer_and_schedule() -> None:
    document = {
        "seed_everything": 7,
        "trainer": {"strategy": "fsdp"},
        "model": {"class_path": "my.Model", "init_args": {"width": 3}},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-4, "betas": [0.9, 0.95], "fused": True, "maximize": False},
        },
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 10}},
    }
    found = read(document)
    assert found.config.training.seed == 7
    assert (found.config.optimizer.name, found.config.optimizer.lr, found.config.optimizer.betas) == (
        "adamw",
        1e-4,
        (0.9, 0.95),
    )
    assert found.config.scheduler.name == "cosine"
    assert "epochs" in found.undecided["scheduler.total_steps"].who
    assert item(document, "model").fit is Fit.IGNORED
    other = item(
        {"trainer": {}, "optimizer": {"class_path": "torch.optim.LBFGS", "init_args": {}}}, "optimizer.class_path"
    )
    assert (other.fit, "training script" in other.note) == (Fit.NEEDS_INPUT, True)


def test_a_saved_file_with_every_argument_at_null_is_plain_ddp() -> None:
    arguments = dict.fromkeys(TRAINER, None)
    outcome = translating.translate({"trainer": {**arguments, "strategy": "auto"}}, "unishard", from_="lightning")
    assert outcome.of(Fit.UNSUPPORTED) == outcome.of(Fit.NEEDS_INPUT) == []
    assert outcome.reading.config.sharding.strategy == "no_shard"


# Laws.


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=True)
    | st.sampled_from(("", "auto", "fsdp", "a.b.C", "16-true"))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("class_path", "init_args", "x")), inner)
    ),
)
names = st.sampled_from(
    [name for name in FORMAT.keys if "." not in name]
    + [
        "stage",
        "config",
        "device_mesh",
        "auto_wrap_policy",
        "mixed_precision",
        "offload_optimizer",
        "cpu_offload",
        "optimizer",
        "lr_scheduler",
    ]
)
strategies = st.sampled_from(["ddp", "fsdp", "deepspeed"]) | st.builds(
    lambda name, arguments: built(name, **arguments),
    st.sampled_from(["FSDPStrategy", "DeepSpeedStrategy", "DDPStrategy", "ModelParallelStrategy"]),
    st.dictionaries(names, values, max_size=4),
)


def _flat(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    if isinstance(value, dict) and value:
        return [key for name, inner in value.items() for key in _flat(inner, (*path, name))]
    return [".".join(path)]


@settings(max_examples=200, deadline=None)
@given(strategies | values, st.dictionaries(names, values, max_size=5), st.booleans())
def test_whatever_stands_in_a_file_every_key_is_accounted_for(
    strategy: Any, arguments: dict[str, Any], cli: bool
) -> None:
    inner = {**arguments, "strategy": strategy}
    document = {"trainer": inner} if cli else inner
    for to in ("unishard", "lightning"):
        outcome = translating.translate(document, to, from_="lightning")
        keys = [item.key for item in outcome.items if not item.assumed]
        assert len(keys) == len(set(keys))
        for leaf in _flat(document):
            assert any(leaf == key or leaf.startswith(f"{key}.") or key.startswith(f"{leaf}.") for key in keys), leaf


sections = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(
            [
                "fp32",
                "bf16",
                "fp16",
                {"compute": "bf16", "reduce": "bf16", "buffers": "bf16"},
                {"compute": "bf16", "master": "bf16"},
                {"compute": "fp16", "initial_loss_scale": 1024.0, "loss_scale_growth_interval": 50},
                {"compute": "fp16", "master": "fp16", "loss_scale": 1.0},
            ]
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "gradient_accumulation_steps": st.integers(1, 64),
                "gradient_clipping": st.none() | st.floats(1e-3, 100),
                "seed": st.integers(0, 2**32 - 1),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {"name": st.sampled_from(("adamw", "adam", "sgd", "adagrad", "lion"))},
            optional={"lr": st.floats(1e-6, 1.0), "weight_decay": st.floats(0, 1)},
        ),
    },
)
shardings = st.sampled_from(
    [
        {"strategy": "no_shard"},
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "reshard_after_forward": False, "units": ["Block", "Head"]},
        {"strategy": "full_shard", "min_unit_params": 1000},
        {"strategy": "hybrid_shard", "group_size": 4, "units": ["Block"]},
        {"strategy": "hybrid_shard", "reshard_after_forward": False, "units": ["Block"]},
    ]
)
BY_SCRIPT = ("your training script", "your LightningModule", "none", "")


@settings(max_examples=150, deadline=None)
@given(shardings, sections, st.booleans(), st.sampled_from(("none", "cpu")), st.sampled_from(("none", ["Block"])))
def test_what_lightning_can_say_comes_back_the_same(
    sharding: dict[str, Any], rest: dict[str, Any], deepspeed: bool, offload: str, recomputed: Any
) -> None:
    sharded = sharding["strategy"] != "no_shard"
    said = {
        "sharding": sharding,
        **rest,
        **({"activation_checkpointing": recomputed} if sharded and not deepspeed else {}),
    }
    if sharded and sharding["strategy"] != "hybrid_shard":
        said["offload"] = offload
    if deepspeed:
        said |= {"backend": "deepspeed", "sharding": {"strategy": "full_shard" if sharded else "no_shard"}}
    ranks = Topology(world_size=8, local_world_size=4)
    reading = translating.read(said, "unishard")
    words = FORMAT.write(reading, ranks).fields
    outcome = translating.translate(said, "lightning", topology=ranks)
    compile(outcome.text, "snippet", "exec")
    again = translating.read(outcome.document, "lightning")
    for path, word in words.items():
        if path in ("launch.nodes", "launch.processes_per_node"):
            assert (
                value_at(again.config, path) == {"nodes": 2, "processes_per_node": 4}[path.removeprefix("launch.")]
            ), "as asked for"
        elif word.fit in (Fit.EXACT, Fit.EQUIVALENT) and word.key not in BY_SCRIPT:
            assert value_at(again.config, path) == value_at(reading.config, path), path


@settings(max_examples=60, deadline=None)
@given(strategies, st.sampled_from(("32-true", "bf16-mixed", "16-true")), st.booleans())
def test_writing_lightning_again_changes_nothing(strategy: Any, precision: str, cli: bool) -> None:
    inner = {"strategy": strategy, "precision": precision, "logger": False, "max_steps": 10}
    once = _again({"trainer": inner} if cli else inner)
    twice = _again(once.document)
    assert twice.document == once.document
    assert twice.reading.config == once.reading.config or once.of(Fit.UNSUPPORTED) or once.of(Fit.APPROXIMATE)


def _again(document: Any) -> Outcome:
    return translating.translate(document, "lightning", from_="lightning")


def test_every_leaf_of_the_schema_has_a_row_in_order() -> None:
    assert list(FORMAT.rules) == [path for path, _ in leaves(Config)]


def test_keys_that_concern_lightning_alone_are_kept_when_lightning_is_written() -> None:
    document = {"trainer": {"strategy": "fsdp", "logger": False, "max_epochs": 3}, "model": {"width": 4}}
    outcome = _again(document)
    assert outcome.document["model"] == {"width": 4}
    assert (outcome.document["trainer"]["max_epochs"], outcome.document["trainer"]["logger"]) == (3, False)
    assert "max_epochs=3" in outcome.text


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("shard_optimizer", "SHARD_GRAD_OP"),
        ("shard_grad_op", "SHARD_GRAD_OP"),
        ("hybrid_shard_grad_op", "_HYBRID_SHARD_ZERO2"),
    ],
)
def test_what_fsdp_does_not_have_becomes_the_nearest_and_says_so(name: str, sharding: str) -> None:
    outcome = translating.translate({"sharding": name}, "lightning")
    assert outcome.document["trainer"]["strategy"]["init_args"]["sharding_strategy"] == sharding
    found = next(item for item in outcome.items if item.key == "sharding.strategy")
    assert found.fit is Fit.APPROXIMATE
    assert "deepspeed" in found.note


def test_a_backend_that_lightning_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = read({"strategy": "fsdp"})
    other = reading._replace(config=reading.config.model_copy(update={"backend": "third"}))
    found = FORMAT.write(other, Topology())
    assert found.document == {}
    assert found.fields["backend"].fit is Fit.UNSUPPORTED
    assert FORMAT.render(found.document, other).startswith("# Lightning has no strategy")


def test_a_file_of_lightning_is_recognised_and_another_trainers_is_not() -> None:
    for document in ({"trainer": {"strategy": "ddp"}}, {"strategy": "fsdp", "precision": "32"}, built("DDPStrategy")):
        assert translating.read(document).format == "lightning"
    with pytest.raises(Exception, match="is a config of verl"):
        translating.read({"trainer": {"total_epochs": 3, "nnodes": 1}, "actor": {}})
    with pytest.raises(Exception, match="no known format"):
        translating.read({"trainer": {"total_epochs": 3, "workers": 1}, "actor": {}})


def test_classes_named_without_their_module_are_imported_in_the_snippet() -> None:
    callbacks = [{"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 2}}]
    text = _again(
        {
            "trainer": {
                "strategy": {"class_path": "DDPStrategy"},
                "callbacks": callbacks,
                "logger": {"class_path": "CSVLogger"},
            }
        }
    ).text
    for line in ("callbacks import ModelCheckpoint", "loggers import CSVLogger", "strategies import DDPStrategy"):
        assert f"from lightning.pytorch.{line}\n" in text
    assert "ModelCheckpoint(save_top_k=2)" in text


def test_values_that_the_launch_fills_in_are_left_to_it() -> None:
    outcome = translating.translate(
        {"trainer": {"strategy": "ddp", "devices": "${gpus}", "num_nodes": "${nodes}"}}, "unishard", from_="lightning"
    )
    assert outcome.of(Fit.UNSUPPORTED) == []
    assert outcome.reading.topology is None


def test_a_block_in_a_config_file_decides_the_format(tmp_path: Any) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    path = tmp_path / "lightning.yaml"
    path.write_text(
        "trainer:\n  precision: bf16-mixed\n  strategy: {class_path: DeepSpeedStrategy, init_args: {config: "
        "zero.json}}\n"
    )
    outcome = translating.translate(path, "unishard")
    assert outcome.reading.config.precision.compute == "bf16"
    found = {item.key: item for item in outcome.items}
    assert found["trainer.strategy.init_args.config.bf16.enabled"].becomes == "precision.compute"
    assert found["trainer.precision"].fit is Fit.IGNORED


def test_another_backend_takes_no_arguments_of_the_strategy_before() -> None:
    document = {"trainer": {"strategy": built("FSDPStrategy", use_orig_params=True), "logger": False}}
    outcome = translating.translate(document, "lightning", from_="lightning", overrides=["backend=deepspeed"])
    strategy = outcome.document["trainer"]["strategy"]
    assert strategy["class_path"].endswith("DeepSpeedStrategy")
    assert set(strategy["init_args"]) == {"config"}
    assert outcome.document["trainer"]["logger"] is False


def test_a_rate_that_only_the_script_knows_stays_named_and_is_no_default() -> None:
    params = {"lr": "auto", "weight_decay": 0.1}
    document = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": params},
        "train_micro_batch_size_per_gpu": "auto",
    }
    outcome = translating.translate(document, "lightning", from_="deepspeed")
    config = outcome.document["trainer"]["strategy"]["init_args"]["config"]
    assert config["optimizer"]["params"]["lr"] == "auto"
    assert "train_micro_batch_size_per_gpu" not in config
    found = {item.key: item for item in outcome.items}
    assert found["optimizer.params.lr"].fit is Fit.NEEDS_INPUT
    assert found["train_micro_batch_size_per_gpu"].fit is Fit.EXACT


def test_groups_without_a_number_of_ranks_need_a_decision() -> None:
    sharding = {"strategy": "hybrid_shard", "group_size": 8}
    found = {item.key: item for item in translating.translate({"sharding": sharding}, "lightning").items}
    assert found["sharding.group_size"].fit is Fit.NEEDS_INPUT
    assert "device_mesh=(replicas, 8)" in found["sharding.group_size"].note
    outcome = translating.translate(
        {"sharding": sharding}, "lightning", topology=Topology(world_size=16, local_world_size=8)
    )
    assert outcome.document["trainer"]["strategy"]["init_args"]["device_mesh"] == [2, 8]


def test_groups_without_names_of_blocks_are_asked_for_them() -> None:
    """Lightning refuses them without a policy or a mesh."""
    outcome = translating.translate({"sharding": "hybrid_shard"}, "lightning")
    units = next(item for item in outcome.items if item.key == "sharding.units")
    assert (units.fit, "--set sharding.units=[Block]" in units.note) == (Fit.NEEDS_INPUT, True)
    assert "# Set auto_wrap_policy to your model's block class, or Lightning refuses HYBRID_SHARD." in outcome.text


@pytest.mark.parametrize(
    ("beside", "key"),
    [
        ({"strategy": {}}, "strategy"),
        ({"strategy": "ddp"}, "strategy"),
        ({"_target_": "DDPStrategy"}, "_target_"),
    ],
)
def test_a_second_strategy_beside_a_class_is_refused(beside: dict[str, Any], key: str) -> None:
    found = item({"class_path": "FSDPStrategy", "init_args": {"cpu_offload": True}, **beside}, key)
    assert found.fit is Fit.UNSUPPORTED
    assert "keep one of the two" in found.note


def test_an_argument_of_the_class_hides_none_of_the_trainers() -> None:
    document = {"class_path": "FSDPStrategy", "init_args": {"devices": 2}, "devices": 4}
    keys = [item.key for item in translating.translate(document, "unishard", from_="lightning").items]
    assert {"devices", "init_args.devices"} <= set(keys)


@pytest.mark.parametrize("class_", [5, None, {}, [1]])
def test_a_class_without_a_name_is_refused(class_: Any) -> None:
    assert item({"class_path": class_, "strategy": "ddp"}, "class_path").fit is Fit.UNSUPPORTED
