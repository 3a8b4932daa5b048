"""DeepSpeed's JSON, read and written: what each key means, and what survives there and back."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from unishard.config import Config, leaves, value_at
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.rules import Fit
from unishard.formats import catalog, translate
from unishard.formats.source import open_source
from unishard_deepspeed.keys import ROWS

EIGHT = Topology(world_size=8, local_world_size=8)
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
FP16 = {"fp16": {"enabled": True}}


def outcome(document, to="unishard", *overrides, topology=None):
    return translate(document, to, from_="deepspeed", overrides=overrides, topology=topology)


def config(document, *overrides, topology=None):
    found = outcome(document, "unishard", *overrides, topology=topology)
    assert not found.of(Fit.UNSUPPORTED), found.of(Fit.UNSUPPORTED)
    return found.reading.config


def item(document, key, to="unishard"):
    return next(item for item in outcome(document, to).items if item.key == key)


# -- what DeepSpeed assumes ------------------------------------------------------------------------


def test_an_absent_clip_is_deepspeeds_own():
    assert config({"train_micro_batch_size_per_gpu": 2}).training.gradient_clipping == 1.0
    assert config({"gradient_clipping": 0}).training.gradient_clipping is None


def test_absent_zero_is_no_sharding():
    assert config({"train_batch_size": 8}).sharding.strategy == "no_shard"


def test_sums_over_ranks_travel_in_the_format_of_compute():
    precision = config({"bf16": {"enabled": "true"}}).precision
    assert (precision.compute, precision.reduce, precision.accumulate, precision.master) == (
        "bf16",
        "bf16",
        "fp32",
        "fp32",
    )
    assert (
        item({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}, "data_types.grad_accum_dtype").fit
        is Fit.EQUIVALENT
    )


def test_names_of_buffers_in_fp32_are_patterns():
    def kept(names):
        return {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": names}}

    assert config({"bf16": {"enabled": True}}).precision.keep_fp32 == config(kept("auto")).precision.keep_fp32 == "auto"
    assert config(kept([])).precision.keep_fp32 == []
    assert config(kept(["gate.*bias", "norm"])).precision.keep_fp32 == ["gate..*bias", "norm"]
    assert item(kept(["norm"]), "data_types.keep_in_fp32_modules").fit is Fit.APPROXIMATE, (
        "DeepSpeed keeps no parameters"
    )
    own = {"precision": {"compute": "bf16", "keep_fp32": ["gate..*bias"]}, "backend": "deepspeed"}
    written = translate(own, "deepspeed", from_="unishard")
    assert written.document["data_types"]["keep_in_fp32_modules"] == ["gate.*bias"]


def test_adam_is_adamw_unless_it_says_otherwise():
    found = config(ADAM).optimizer
    assert (found.name, found.weight_decay) == ("adamw", 0.0)
    assert config({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).optimizer.name == "adam"
    assert config({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}).optimizer.weight_decay == 0.01


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 64}, (8, 1, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "2"}, (2, 4, 64)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (2, 4, 64)),
        ({"train_micro_batch_size_per_gpu": 2}, (2, 1, None)),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            (2, 3, None),
        ),
    ],
)
def test_sizes_that_follow_from_the_others(sizes, expected):
    training = config(sizes, topology=EIGHT).training
    assert (training.micro_batch_size, training.gradient_accumulation_steps, training.global_batch_size) == expected


def test_without_the_number_of_ranks_they_are_undecided():
    found = outcome({"train_batch_size": 64, "gradient_accumulation_steps": 2})
    assert "--world-size" in found.reading.undecided["training.micro_batch_size"].who


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4},
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    assert outcome(sizes, topology=EIGHT).of(Fit.UNSUPPORTED)


@pytest.mark.parametrize(
    "document",
    [
        {"zero_optimization": {"stage": 2}},
        {"train_batch_size": "auto"},
        {"train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
    ],
)
def test_a_size_that_the_file_leaves_out_does_not_become_auto(document):
    written = dict(flat(outcome(document, "deepspeed").document))
    assert {key for key, value in written.items() if value == "auto"} == {
        key for key, value in document.items() if value == "auto"
    }


def test_auto_is_written_for_a_tool_that_fills_it_in():
    accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}, "num_processes": 2}
    assert translate(accelerate, "deepspeed", from_="accelerate").document["train_micro_batch_size_per_gpu"] == "auto"
    lightning = {"trainer": {"strategy": "deepspeed_stage_2", "devices": 2}}
    assert "train_micro_batch_size_per_gpu" not in translate(lightning, "deepspeed", from_="lightning").document


# -- ZeRO ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        (True, "shard_optimizer"),
        (False, "no_shard"),
        (2, "shard_grad_op"),
        ({"stage": "3"}, "full_shard"),
        ({}, "no_shard"),
    ],
)
def test_stages_in_all_their_spellings(zero, strategy):
    assert config({"zero_optimization": zero}).sharding.strategy == strategy


def test_names_without_their_prefix_mean_the_same():
    short = {"stage": 3, "prefetch_bucket_size": 5e6, "max_reuse_distance": 0, "max_live_parameters": 0}
    long = {"stage": 3, **{f"stage3_{name}": value for name, value in short.items() if name != "stage"}}
    assert config({"zero_optimization": short}) == config({"zero_optimization": long})
    assert config({"zero_optimization": short}).communication.prefetch_bucket_size == 5_000_000


def test_stage_3_settings_below_it_are_dropped():
    found = outcome(
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 5, "offload_param": {"device": "cpu"}}}
    )
    assert not found.of(Fit.UNSUPPORTED)
    assert found.reading.config.offload.params == "none"


@pytest.mark.parametrize(
    ("zero", "places"),
    [
        ({"stage": 2, "cpu_offload": True}, ("none", "cpu")),
        (
            {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": False},
            ("cpu", "cpu"),
        ),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}, ("nvme", "none")),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, ("none", "none")),
    ],
)
def test_offload_of_every_age(zero, places):
    offload = config({"zero_optimization": zero}).offload
    assert (offload.params, offload.optimizer) == places


def test_a_place_that_accelerate_fills_in_is_undecided_where_deepspeed_offloads_at_all():
    zero = {"stage": 2, "offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}}
    found = outcome({"zero_optimization": zero}, "unishard")
    assert set(found.reading.undecided) == {"offload.optimizer"}
    assert "DeepSpeedPlugin" in item({"zero_optimization": zero}, "zero_optimization.offload_optimizer.device").note
    assert config({"zero_optimization": zero}, "offload.optimizer=cpu").offload.optimizer == "cpu"


def test_a_stage_that_accelerate_fills_in_is_undecided():
    assert set(outcome({"zero_optimization": {"stage": "auto"}}).reading.undecided) == {"sharding.strategy"}


def test_an_offload_outside_its_section_is_told_where_it_belongs():
    note = item({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device").note
    assert "did you mean 'zero_optimization.offload_optimizer.device'" in note


def test_a_bucket_of_nothing_reduces_each_gradient_by_itself():
    assert config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}).communication.reduce_bucket_size == 1


def test_the_first_name_of_a_reduction_in_fp32():
    assert config({**FP16, "fp32_allreduce": True}).precision.reduce == "fp32"
    assert config({**FP16, "fp32_allreduce": False}).precision.reduce == "fp16"


def test_accelerate_silences_deepspeeds_log():
    assert item({"steps_per_print": float("inf")}, "steps_per_print").fit is Fit.IGNORED


@pytest.mark.parametrize("section", ["fp16", "bf16"])
def test_amps_level_says_nothing_in_another_section(section):
    found = item({section: {"enabled": True, "opt_level": "O2"}}, f"{section}.opt_level")
    assert (found.fit, "belongs to amp" in found.note) == (Fit.IGNORED, True)


def test_two_pins_that_differ_are_no_contradiction():
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert config({"zero_optimization": zero}).offload.pin_memory


def test_mics_is_hybrid_sharding():
    sharding = config({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).sharding
    assert (sharding.strategy, sharding.group_size) == ("hybrid_shard", 4)


def test_a_setting_of_deepspeed_alone_is_kept_for_it():
    found = outcome({"zero_optimization": {"stage": 3, "sub_group_size": "1e8", "zero_quantized_weights": True}})
    assert found.reading.config.native == {
        "deepspeed": {"zero_optimization": {"sub_group_size": 10**8, "zero_quantized_weights": True}}
    }
    elsewhere = {i.key: i.fit for i in outcome(found.reading.source.data, "unishard", "backend=fsdp").items}
    assert elsewhere["zero_optimization.sub_group_size"] is Fit.IGNORED
    assert elsewhere["zero_optimization.zero_quantized_weights"] is Fit.APPROXIMATE


# -- precision -------------------------------------------------------------------------------------


def test_fp16_scales_as_deepspeed_does():
    precision = config({"fp16": {"enabled": True, "initial_scale_power": 12}}).precision
    assert (precision.loss_scale, precision.initial_loss_scale, precision.loss_scale_growth_interval) == (
        "dynamic",
        4096.0,
        1000,
    )
    assert config({"fp16": {"enabled": True, "loss_scale": 128}}).precision.loss_scale == 128.0
    assert item(FP16, "fp16.hysteresis").fit is Fit.EQUIVALENT
    assert item({"fp16": {"enabled": True, "hysteresis": 8}}, "fp16.hysteresis").fit is Fit.APPROXIMATE


@pytest.mark.parametrize("to", ["hf", "lightning", "accelerate", "axolotl", "deepspeed"])
def test_a_default_of_deepspeed_is_the_same_under_another_tool(to):
    document = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    document["gradient_accumulation_steps"] = 4
    found = outcome(document, to)
    assert found.status(strict=True) == 0
    ours = ("grad_accum_dtype", "hysteresis", "overlap_comm", "reduce_bucket_size", "memory_efficient_linear")
    assert not [key for key, _ in flat(found.document) if key.endswith(ours)]


def test_what_the_script_decides_stays_open_until_it_is_given():
    document = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert set(outcome(document).reading.undecided) == {"precision.compute", "precision.reduce"}
    precision = config(document, "precision.compute=bf16").precision
    assert (precision.compute, precision.reduce) == ("bf16", "bf16")


AUTO = {"fp16": {"enabled": "auto", "initial_scale_power": 12, "loss_scale_window": 500}, "bf16": {"enabled": "auto"}}


def test_a_scale_is_kept_until_it_is_decided_whether_there_is_one():
    found = outcome(AUTO)
    assert found.document["precision"]["initial_loss_scale"] == 4096.0
    again = translate(yaml.safe_load(found.text), "deepspeed", from_="unishard")
    assert (
        again.document["fp16"].items()
        >= {"enabled": "auto", "initial_scale_power": 12, "loss_scale_window": 500}.items()
    )
    assert outcome(AUTO, "hf").document["deepspeed"]["fp16"]["initial_scale_power"] == 12


@pytest.mark.parametrize(("compute", "scale", "interval"), [("fp16", 4096.0, 500), ("bf16", 65536.0, 2000)])
def test_the_file_s_own_scale_counts_once_fp16_is_chosen(compute, scale, interval):
    found = outcome(AUTO, "unishard", f"precision.compute={compute}")
    precision = found.reading.config.precision
    assert (precision.initial_loss_scale, precision.loss_scale_growth_interval, precision.reduce) == (
        scale,
        interval,
        compute,
    )
    assert not found.of(Fit.UNSUPPORTED)
    assert not found.of(Fit.NEEDS_INPUT)


def test_deepspeeds_own_scale_counts_once_fp16_is_chosen():
    precision = config({"fp16": {"enabled": "auto"}}, "precision.compute=fp16").precision
    assert precision.loss_scale_growth_interval == 1000


def test_a_reduction_in_bf16_needs_bf16():
    document = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "communication_data_type": "bf16"}
    assert not outcome(document).of(Fit.UNSUPPORTED)
    assert config(document, "precision.compute=bf16").precision.reduce == "bf16"
    assert item({**AUTO, **document, "fp16": AUTO["fp16"]}, "communication_data_type").fit in (
        Fit.EXACT,
        Fit.NEEDS_INPUT,
    )


def test_what_depends_on_a_stage_or_a_place_that_is_undecided_is_kept():
    zero = {
        "stage": "auto",
        "stage3_prefetch_bucket_size": 7,
        "stage3_max_reuse_distance": 10**15,
        "overlap_comm": "auto",
    }
    found = config({"zero_optimization": zero}, "sharding.strategy=full_shard")
    assert (found.communication.prefetch_bucket_size, found.sharding.reshard_after_forward) == (7, False)
    assert config({"zero_optimization": zero}, "sharding.strategy=shard_grad_op").sharding.reshard_after_forward
    zero = {"stage": 2, "offload_optimizer": {"device": "auto", "pin_memory": False}}
    assert not config({"zero_optimization": zero}, "offload.optimizer=cpu").offload.pin_memory
    assert config({"zero_optimization": zero}, "offload.optimizer=none").offload.pin_memory


def test_a_switch_that_is_set_otherwise_takes_what_depends_on_it_along():
    document = {
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7},
    }
    found = config(document, "precision.compute=bf16", "precision.reduce=fp32", "sharding.strategy=shard_grad_op")
    assert (found.precision.compute, found.sharding.strategy) == ("bf16", "shard_grad_op")
    notes = {item.key: item.note for item in outcome(document, "unishard", "precision.compute=bf16").of(Fit.IGNORED)}
    assert "needs no loss scale" in notes["fp16.initial_scale_power"]


def test_pure_bf16_that_is_undecided():
    document = {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    document["zero_optimization"] = {"stage": 2}
    assert config(document, "precision.compute=bf16").precision.pure
    assert config(document, "precision.compute=fp32").precision.master == "fp32"


def test_pure_bf16():
    block = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert config({"bf16": block, "zero_optimization": {"stage": 2}}).precision.pure


# -- schedules -------------------------------------------------------------------------------------


def scheduled(type_, **params):
    return {**ADAM, "scheduler": {"type": type_, "params": params}}


def test_a_warm_up_is_logarithmic_and_its_top_is_the_rate():
    found = config(scheduled("WarmupLR", warmup_min_lr=5e-4, warmup_max_lr=2e-3, warmup_num_steps=10))
    assert found.optimizer.lr == 2e-3
    scheduler = found.scheduler
    assert (scheduler.name, scheduler.warmup_steps, scheduler.warmup_type) == ("constant", 10, "log")
    assert (scheduler.warmup_start_ratio, scheduler.delay_steps) == (0.25, 1)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_shortest_warm_up_lasts_two_updates(steps):
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.5, "warmup_max_lr": 1.0, "warmup_num_steps": steps}}
    found = config({**ADAM, "scheduler": scheduler}).scheduler
    assert (found.warmup_steps, found.warmup_start_ratio, found.delay_steps) == (2, 0.5, 1)


def test_what_transformers_fills_in():
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    document = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": auto},
    }
    assert set(outcome(document).reading.undecided) == {
        "optimizer.lr",
        "scheduler.warmup_steps",
        "scheduler.total_steps",
    }
    written = outcome(document, "deepspeed").document
    assert written == document


# -- what cannot be had ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "key", "instead"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}, "optimizer.type", "adamw"),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 9}}}, "optimizer.type", "adamw"),
        ({"optimizer": {"type": "RMSprop"}}, "optimizer.type", "in the training script"),
        (scheduled("WarmupCosineLR"), "scheduler.type", "total_num_steps"),
        (scheduled("LinearLR"), "scheduler.params.start_factor", "must be 1"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "nvme_path",
        ),
        (scheduled("warmuplr"), "scheduler.type", "did you mean 'WarmupLR'"),
        ({"elasticity": {"enabled": True}}, "elasticity", "training.micro_batch_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "remove it"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "remove it"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "write mean"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "from 0 to 3"),
        (
            {"zero_optimization": {"stage": 2, "overlap_com": True}},
            "zero_optimization.overlap_com",
            "did you mean 'overlap_comm'?",
        ),
        ({"bf16": True}, "bf16", "must be a mapping of keys"),
        ({"gradient_clipping": [1]}, "gradient_clipping", "must be a number"),
    ],
)
def test_is_refused_with_what_instead(document, key, instead):
    found = item(document, key)
    assert found.fit is Fit.UNSUPPORTED
    assert instead in found.note


@pytest.mark.parametrize(
    "section",
    [
        {"elasticity": {"enabled": False}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"sparse_gradients": False},
        {"amp": {"enabled": "false"}},
    ],
)
def test_a_removed_section_that_is_off_is_left_out(section):
    found = outcome(section, "deepspeed")
    assert not found.of(Fit.UNSUPPORTED)
    assert not section.keys() & found.document.keys()


def test_a_top_level_key_that_deepspeed_overlooks():
    found = item({"gradient_cliping": 0.5}, "gradient_cliping")
    assert found.fit is Fit.IGNORED
    assert "did you mean 'gradient_clipping'?" in found.note


def test_what_concerns_deepspeed_alone_is_repeated_in_its_own_format():
    document = {"steps_per_print": 7, "wandb": {"enabled": True}, "flops_profiler": {"enabled": False}, "my_key": 1}
    written = outcome(document, "deepspeed").document
    assert {key: written[key] for key in document} == document
    assert not document.keys() & outcome(document).document.keys()


def test_an_optimizer_that_only_the_script_has_stays_with_it():
    assert "optimizer" not in outcome({"train_batch_size": 8}, "deepspeed").document
    assert (
        "optimizer"
        not in outcome({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}, "deepspeed").document
    )


def test_every_key_that_native_settings_know_has_a_row():
    rows = registry.arguments("deepspeed").keys
    assert [
        key
        for key in ROWS
        if key not in rows and key.rpartition(".")[0] not in rows and key != "timers.throughput.enabled"
    ] == []


def test_a_warm_up_longer_than_its_schedule():
    found = outcome(scheduled("WarmupDecayLR", warmup_num_steps=20, total_num_steps=10))
    refused = {item.key: item.note for item in found.of(Fit.UNSUPPORTED)}
    assert "must be smaller than total_steps (10)" in refused["scheduler.params.warmup_num_steps"]


# -- laws ------------------------------------------------------------------------------------------

ratio = st.floats(0, 1)
rates = st.floats(1e-8, 1e2)


@st.composite
def expressible(draw):
    """Configs of every kind that DeepSpeed has words for, and some that it has not."""
    strategy = draw(st.sampled_from(("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")))
    compute = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    name = draw(st.sampled_from(("adamw", "adam", "sgd", "adagrad", "lion")))
    low = st.sampled_from(("fp32", compute))
    precision = {"compute": compute, "reduce": draw(low), "accumulate": draw(low)}
    if compute == "fp16":
        scales = {
            "loss_scale": "dynamic",
            "initial_loss_scale": 2.0 ** draw(st.integers(0, 30)),
            "loss_scale_growth_interval": 50,
        }
        precision |= draw(st.sampled_from((scales, {"loss_scale": 1024.0})))
    optimizer = {"name": name, "lr": draw(rates), "weight_decay": draw(ratio)}
    if name in ("adamw", "adam", "lion"):
        optimizer["betas"] = [draw(st.floats(0, 0.999)), 0.99]
    document = {
        "sharding": {"strategy": strategy},
        "precision": precision,
        "optimizer": optimizer,
        "scheduler": draw(schedules()),
        "training": {
            "micro_batch_size": draw(st.integers(1, 64)),
            "gradient_accumulation_steps": draw(st.integers(1, 64)),
            "gradient_clipping": draw(st.none() | rates),
            "nonfinite": draw(st.sampled_from(("skip", "raise") if compute == "fp16" else ("skip", "raise", "ignore"))),
        },
        "communication": {"reduce_bucket_size": draw(st.integers(1, 10**9)), "overlap": draw(st.booleans())},
    }
    if strategy != "no_shard":
        document["offload"] = {"optimizer": draw(st.sampled_from(("none", "cpu")))}
    if strategy == "full_shard":
        document["offload"]["params"] = draw(st.sampled_from(("none", "cpu")))
        document["sharding"] |= {
            "reshard_after_forward": draw(st.booleans()),
            "units": draw(st.sampled_from(("auto", ["Block"]))),
        }
        document["communication"]["prefetch_bucket_size"] = draw(st.integers(0, 10**9))
    return document


@st.composite
def schedules(draw):
    warmup = draw(st.integers(0, 100))
    schedule = {"name": draw(st.sampled_from(("constant", "linear", "cosine"))), "warmup_steps": warmup}
    if warmup > 1:
        schedule |= {"warmup_type": draw(st.sampled_from(("log", "linear"))), "delay_steps": draw(st.integers(0, 2))}
        schedule["warmup_start_ratio"] = draw(ratio)
    if schedule["name"] != "constant":
        schedule |= {"total_steps": warmup + draw(st.integers(1, 1000)), "min_lr_ratio": draw(ratio)}
    return schedule


def near(value):
    """A rate may come back as another product of the same numbers."""
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@given(expressible())
def test_there_and_back_is_the_identity_on_what_is_exact(document):
    there = translate(document, "deepspeed", from_="unishard")
    words = catalog.get("deepspeed").write(there.reading, Topology()).fields
    back = outcome(json.loads(there.text)).reading.config
    for path, _ in leaves(Config):
        if words[path].fit is Fit.EXACT and path != "backend":
            assert value_at(back, path) == near(value_at(there.reading.config, path)), path


@given(expressible())
def test_translating_twice_changes_nothing(document):
    once = translate(document, "deepspeed", from_="unishard").document
    twice = outcome(once, "deepspeed").document
    assert {key: near(value) for key, value in flat(once)} == dict(flat(twice))


words = st.sampled_from(
    ("auto", "cpu", "true", "1e9", "", None, -1, 0, 1, 3, 2.5, True, [], {}, {"stage": 3}, ["auto"], {"a": {"b": 1}})
)
KEYS = sorted(registry.arguments("deepspeed").keys)


@given(st.data())
def test_every_key_with_any_value_has_one_place(data):
    chosen = data.draw(st.dictionaries(st.sampled_from(KEYS), words, max_size=6))
    document = {}
    for key, value in chosen.items():
        *above, name = key.split(".")
        place = document
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place.get(part, {}), dict) else {}
        place[name] = deepcopy(value)
    found = outcome(document, data.draw(st.sampled_from(("unishard", "deepspeed"))))
    for key, _ in flat(document):
        assert sum(not i.assumed and (key == i.key or key.startswith(f"{i.key}.")) for i in found.items) == 1


def test_it_is_recognised(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, // two\n "bf16": {"enabled": true},}')
    assert catalog.recognise(open_source(path)).name == "deepspeed"
    assert translate(path, "unishard").warnings
