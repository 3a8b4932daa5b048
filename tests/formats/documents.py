"""Documents of every format, as people write them, and the same broken in every way that people break them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from accounting import FORMATS
from hypothesis import strategies as st

from unishard.contract import registry
from unishard.formats import catalog

Document = dict[str, Any]

DEEPSPEED: list[Document] = [
    {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "3e-5", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 10, "total_num_steps": 100},
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 5e8,
            "reduce_bucket_size": 500000000,
            "cpu_offload": True,
        },
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "activation_checkpointing": {"partition_activations": False},
        "tensorboard": {"enabled": False},
    },
    {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": True,
        "bfloat16": {"enabled": True},
        "flops_profiler": {},
    },
]

ACCELERATE: list[Document] = [
    {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "downcast_bf16": "no",
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
            "fsdp_use_orig_params": True,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_sync_module_states": True,
        },
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "use_cpu": False,
    },
    {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 100000000,
            "fsdp_offload_params": True,
            "fsdp_activation_checkpointing": True,
        },
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4},
        "mixed_precision": "fp16",
        "num_processes": 8,
        "num_machines": 2,
    },
    {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "deepspeed_multinode_launcher": "standard",
        },
        "mixed_precision": "no",
        "num_processes": 4,
    },
    {
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "fp16",
        "num_processes": 2,
        "gpu_ids": "all",
        "rdzv_backend": "static",
    },
]

HF: list[Document] = [
    {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "max_steps": 100,
        "max_grad_norm": 1.0,
        "bf16": True,
        "optim": "adamw_torch",
        "weight_decay": 0.01,
        "seed": 42,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": True,
            "version": 2,
        },
        "logging_steps": 10,
    },
    {
        "output_dir": "out",
        "per_device_train_batch_size": 1,
        "num_train_epochs": 3,
        "deepspeed": DEEPSPEED[0],
        "fp16": True,
    },
]

LIGHTNING: list[Document] = [
    {
        "trainer": {
            "strategy": "fsdp",
            "precision": "bf16-mixed",
            "accelerator": "gpu",
            "devices": 8,
            "num_nodes": 1,
            "accumulate_grad_batches": 4,
            "gradient_clip_val": 1.0,
        }
    },
    {
        "strategy": {
            "class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
            "init_args": {"stage": 2, "offload_optimizer": True, "allgather_bucket_size": 200000000},
        },
        "precision": "16-mixed",
        "devices": 2,
    },
]

AXOLOTL: list[Document] = [
    {
        "base_model": "NousResearch/Llama-3.2-1B",
        "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        "sequence_len": 2048,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": "auto",
        "gradient_checkpointing": True,
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
        "fsdp_version": 2,
        "fsdp_config": {
            "offload_params": False,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
        },
    },
    {"base_model": "x", "micro_batch_size": 1, "deepspeed": DEEPSPEED[1], "optimizer": "adamw_bnb_8bit", "fp16": True},
]

COMPOSER: list[Document] = [
    {
        "max_seq_len": 2048,
        "global_train_batch_size": 256,
        "device_train_microbatch_size": "auto",
        "max_duration": "100ba",
        "precision": "amp_bf16",
        "seed": 17,
        "optimizer": {"name": "decoupled_adamw", "lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "10ba", "alpha_f": 0.1},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "fsdp_config": {
            "sharding_strategy": "FULL_SHARD",
            "mixed_precision": "PURE",
            "activation_checkpointing": False,
            "limit_all_gathers": True,
        },
        "callbacks": {"speed_monitor": {"window_size": 10}},
    }
]

TORCHTITAN: list[Document] = [
    {
        "job": {"dump_folder": "out"},
        "model": {"name": "llama3", "flavor": "8B"},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {"warmup_steps": 200, "decay_type": "linear", "min_lr_factor": 0.1},
        "training": {
            "local_batch_size": 1,
            "seq_len": 8192,
            "max_norm": 1.0,
            "steps": 1000,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "fsdp_reshard_after_forward": "default",
            "tensor_parallel_degree": 1,
        },
        "activation_checkpoint": {"mode": "selective"},
        "compile": {"enable": False},
    }
]

UNISHARD: list[Document] = [
    {
        "backend": "deepspeed",
        "sharding": {"strategy": "full_shard", "units": ["LlamaDecoderLayer"]},
        "precision": {"compute": "bf16"},
        "offload": "cpu",
        "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        "scheduler": {"name": "cosine", "warmup_steps": 10, "total_steps": 100},
        "native": {"deepspeed": {"zero_optimization": {"sub_group_size": 1000000}}},
    },
    {
        "backend": "fsdp",
        "sharding": "hybrid_shard",
        "training": {"micro_batch_size": "${training.micro_batch_size}"},
        "compile": "none",
    },
]

_SCRIPT: Document = {
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-5,
    "num_train_epochs": 1,
    "output_dir": "out",
}
_FILLED: Document = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
LLAMAFACTORY: list[Document] = [
    {
        **_SCRIPT,
        "model_name_or_path": "m/m",
        "stage": "sft",
        "finetuning_type": "full",
        "cutoff_len": 2048,
        "template": "llama3",
        "bf16": True,
        "deepspeed": _FILLED,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_steps": 100,
    },
    {
        **_SCRIPT,
        "stage": "dpo",
        "finetuning_type": "lora",
        "cutoff_len": 512,
        "fsdp": "full_shard auto_wrap",
        "disable_gradient_checkpointing": True,
    },
]
SWIFT: list[Document] = [
    {
        **_SCRIPT,
        "model": "m/m",
        "tuner_type": "full",
        "torch_dtype": "bfloat16",
        "split_dataset_ratio": 0.01,
        "deepspeed": "zero3",
    },
    {**_SCRIPT, "model": "m/m", "train_type": "lora", "fsdp": "fsdp2", "max_steps": 100, "nproc_per_node": 4},
]
TRL: list[Document] = [
    {
        **_SCRIPT,
        "model_name_or_path": "m/m",
        "dataset_name": "d/d",
        "packing_strategy": "bfd",
        "use_peft": True,
        "max_steps": 10,
    },
    {
        **_SCRIPT,
        "model_name_or_path": "m/m",
        "reward_funcs": ["f"],
        "num_generations": 8,
        "fsdp": True,
        "fsdp_config": {"version": 2},
    },
]

SEEDS: Mapping[str, list[Document]] = {
    "unishard": UNISHARD,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "hf": HF,
    "lightning": LIGHTNING,
    "axolotl": AXOLOTL,
    "composer": COMPOSER,
    "torchtitan": TORCHTITAN,
    "llamafactory": LLAMAFACTORY,
    "swift": SWIFT,
    "trl": TRL,
}

_WORDS = """
auto none no yes true false null cpu nvme cuda bf16 fp16 fp32 bfloat16 float16 16-mixed bf16-mixed adamw AdamW Adam SGD Lamb OneBitAdam
cosine linear constant WarmupLR WarmupDecayLR OneCycle FULL_SHARD full_shard HYBRID_SHARD NO_SHARD SHARD_GRAD_OP zero3 1 2 3 FSDP DEEPSPEED
MULTI_GPU NO TRANSFORMER_BASED_WRAP NO_WRAP SIZE_BASED_WRAP fsdp deepspeed_stage_3 ddp 1e-5 5e8 10ba 1ep 0.1 LlamaDecoderLayer LOCAL_MACHINE
inf nan ${x} a.b BACKWARD_POST PURE DEFAULT selective full 500 -1 1_000 0x10 ../x.json
""".split()  # noqa: SIM905
odd_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(_WORDS),
    st.sampled_from(
        [None, True, False, 0, 1, 2, 3, -1, 4, 8, 100, 500000000, 2**63, 10**30, 0.0, 0.1, 1.0, 1e-5, -0.5, 5e8, 1e300]
    ),
    st.sampled_from([float("inf"), float("-inf"), float("nan"), "", " ", "ä", "\n", "x" * 300]),
    st.sampled_from(
        [
            [],
            {},
            [1],
            [0.9, 0.999],
            ["A"],
            ["A", 1],
            [[]],
            [{}],
            {"enabled": True},
            {"x": 1},
            {"a.b": 2},
            {"stage": 3},
            "a,b",
            [None],
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)


def known_keys(name: str) -> list[str]:
    """Dotted keys of a format, those of the engines where it hands them on."""
    keys = set(catalog.get(name).keys)
    if name == "deepspeed":
        keys |= set(registry.arguments("deepspeed").keys)
    return sorted(keys)


KNOWN = {name: known_keys(name) for name in FORMATS}


def paths_of(data: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every mapping and every value in it."""
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from paths_of(value, (*above, key))


def put(data: Document, path: tuple[str, ...], value: Any) -> None:
    """Write a value, and mappings around it where there are none."""
    *above, last = path
    for key in above:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[last] = value


def take(data: Document, path: tuple[str, ...]) -> Any:
    """Remove what stands at a path, and return it."""
    *above, last = path
    for key in above:
        data = data[key]
    return data.pop(last)


@st.composite
def documents(draw: st.DrawFn, name: str) -> Document:
    """A document that a person wrote, with up to six things changed in it."""
    data = copy.deepcopy(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(0, 6))):
        paths = list(paths_of(data))
        path = draw(st.sampled_from(paths or [("x",)]))
        match draw(st.sampled_from(("replace", "known", "unknown", "remove", "rename", "wrap", "move"))):
            case "replace":
                put(data, path, copy.deepcopy(draw(odd_values)))
            case "known" if KNOWN[name]:
                put(data, tuple(draw(st.sampled_from(KNOWN[name])).split(".")), copy.deepcopy(draw(odd_values)))
            case "unknown":
                put(
                    data,
                    (
                        *path[:-1],
                        draw(st.sampled_from(("stagee", "zero", "a.b", "optimizer.type", "", "1", "ä", "type"))),
                    ),
                    copy.deepcopy(draw(odd_values)),
                )
            case "rename" if path in paths:
                put(data, (*path[:-1], path[-1][:-1]), take(data, path))
            case "wrap" if path in paths:
                put(data, (*path, draw(st.sampled_from(("enabled", "type", "x")))), take(data, path))
            case "move" if path in paths:
                put(data, path[-1:], take(data, path))
            case _ if path in paths:
                take(data, path)
    return data


def reordered(data: Any) -> Any:
    """The same mappings with their keys the other way round."""
    return {key: reordered(value) for key, value in reversed(data.items())} if isinstance(data, Mapping) else data
