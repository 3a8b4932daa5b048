"""Configs as people write them for tools that unishard does not read, by the tool's name."""

from __future__ import annotations

GPT_NEOX = """
{
  "pipe-parallel-size": 1,
  "model-parallel-size": 2,
  "num-layers": 24,
  "hidden-size": 2048,
  "num-attention-heads": 16,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "norm": "layernorm",
  "pos-emb": "rotary",
  "rotary-pct": 0.25,
  "no-weight-tying": true,
  "gpt-j-residual": true,
  "attention-config": [[["flash"], 24]],
  "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min-lr": 0.00002,
  "zero_optimization": {
    "stage": 1, "allgather_partitions": true, "allgather_bucket_size": 500000000, "overlap_comm": true,
    "reduce_scatter": true, "reduce_bucket_size": 500000000, "contiguous_gradients": true
  },
  "train_micro_batch_size_per_gpu": 4,
  "gas": 1,
  "data-impl": "mmap",
  "checkpoint-activations": true,
  "gradient_clipping": 1.0,
  "weight-decay": 0.1,
  "precision": "fp16",
  "fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2},
  "train-iters": 320000,
  "lr-decay-iters": 320000,
  "lr-decay-style": "cosine",
  "warmup": 0.01,
  "distributed-backend": "nccl",
  "steps_per_print": 10,
  "wall_clock_breakdown": true
}
"""

TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/tokenizer.model, max_seq_len: null}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}
seed: 1
batch_size: 2
epochs: 1
optimizer: {_component_: torch.optim.AdamW, lr: 2.0e-5, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: false
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/m, output_dir: /tmp/o}
device: cuda
dtype: bf16
enable_activation_checkpointing: true
fsdp_cpu_offload: true
"""

VERL = """
data: {train_files: /data/train.parquet, val_files: /data/test.parquet, train_batch_size: 256, max_length: 2048}
model: {path: m/m, enable_gradient_checkpointing: true, fsdp_config: {wrap_policy: {min_num_params: 0}, cpu_offload: false}}
actor: {strategy: fsdp, ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 4, optim: {lr: 1.0e-6}}
trainer:
  total_epochs: 3
  project_name: p
  experiment_name: e
  logger: [console, wandb]
  n_gpus_per_node: 8
  nnodes: 1
  device: cuda
"""

MEGATRON = """
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16, add_bias_linear: false}
model_parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, bf16: true, params_dtype: torch.bfloat16}
train_iters: 100000
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
lr_decay_style: cosine
optimizer: adam
use_distributed_optimizer: true
overlap_grad_reduce: true
"""

NEMO = """
name: megatron_gpt
trainer: {devices: 8, num_nodes: 2, accelerator: gpu, precision: bf16-mixed, max_steps: 1000, gradient_clip_val: 1.0}
exp_manager: {exp_dir: null, name: megatron_gpt, create_checkpoint_callback: true}
model:
  micro_batch_size: 4
  global_batch_size: 256
  tensor_model_parallel_size: 2
  megatron_amp_O2: true
  optim: {name: distributed_fused_adam, lr: 2.0e-4}
"""

AUTOMODEL = """
step_scheduler: {global_batch_size: 64, local_batch_size: 8, ckpt_every_steps: 1000, num_epochs: 1}
dist_env: {backend: nccl, timeout_minutes: 1}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: m/m}
distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager, dp_size: none, tp_size: 1, cp_size: 1}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5, betas: [0.9, 0.999], weight_decay: 0}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
"""

BRIDGE = """
model: {_target_: megatron.bridge.models.GPTModelProvider, tensor_model_parallel_size: 2}
train: {train_iters: 20, micro_batch_size: 1, global_batch_size: 32}
optimizer: {lr: 3.0e-4, min_lr: 3.0e-5, use_distributed_optimizer: true}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 2}
checkpoint: {save: /tmp/x, save_interval: 10}
ddp: {overlap_grad_reduce: true}
"""

NANOTRON = """
checkpoints: {checkpoint_interval: 100, checkpoints_path: c}
data_stages: [{name: Training, start_training_step: 1}]
optimizer: {zero_stage: 1, weight_decay: 0.01, clip_grad: 1.0, accumulate_grad_in_fp32: true}
parallelism: {dp: 4, pp: 1, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 2, sequence_length: 2048, train_steps: 1000, batch_accumulation_per_replica: 1}
"""

FACTORY_1 = """
model: m/m
dist_config: {name: fsdp2, dcp_path: null}
kernel_config: {name: auto}
micro_batch_size: 1
global_batch_size: 8
"""

LITGPT = """
checkpoint_dir: checkpoints/m
precision: bf16-true
devices: 4
num_nodes: 1
train: {save_interval: 200, global_batch_size: 64, micro_batch_size: 4, lr_warmup_steps: 25, max_tokens: 3000000}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002, weight_decay: 0.0}}
"""

OLMO = """
run_name: r
model: {d_model: 2048, n_heads: 16, n_layers: 16, rope: true}
optimizer: {name: adamw, learning_rate: 4.0e-4, weight_decay: 0.1}
scheduler: {name: cosine_with_warmup, t_warmup: 2000, alpha_f: 0.1}
tokenizer: {identifier: t, truncate_direction: right}
max_duration: 739328
global_train_batch_size: 2048
device_train_microbatch_size: 8
precision: amp_bf16
fsdp: {wrapping_strategy: null, precision: mixed}
speed_monitor: {window_size: 20}
"""

FAIRSEQ = """
common: {fp16: true, log_format: json, seed: 1}
checkpoint: {save_interval_updates: 25000, keep_interval_updates: 1}
distributed_training: {distributed_world_size: 8, ddp_backend: fully_sharded}
optimization: {max_update: 400000, lr: [0.0005], clip_norm: 10}
criterion: {_name: wav2vec}
optimizer: {_name: adam, adam_betas: "(0.9,0.98)"}
"""

MEGATRON_SWIFT = """
model: m/m
tuner_type: lora
dataset: [a/b]
split_dataset_ratio: 0.01
micro_batch_size: 1
global_batch_size: 4
num_train_epochs: 1
lr: 1e-4
lr_warmup_fraction: 0.05
cross_entropy_loss_fusion: true
recompute_granularity: full
no_save_optim: true
"""

OPEN_INSTRUCT = """
model_name_or_path: m/m
tokenizer_name: m/m
use_slow_tokenizer: true
dataset_mixer: {a/b: 1.0}
max_seq_length: 4096
preprocessing_num_workers: 128
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 5.0e-6
lr_scheduler_type: linear
warmup_ratio: 0.03
weight_decay: 0.0
num_train_epochs: 2
output_dir: /output/
with_tracking: true
report_to: [wandb]
logging_steps: 1
checkpointing_steps: epoch
"""

WANDB = """
wandb_version: 1
_wandb: {desc: null, value: {cli_version: 0.16.0}}
per_device_train_batch_size: {desc: null, value: 2}
num_train_epochs: {desc: null, value: 2}
rotary_pct: {desc: null, value: 0.25}
num_attention_heads: {desc: null, value: 8}
hidden_size: {desc: null, value: 512}
max_position_embeddings: {desc: null, value: 512}
"""

FILES = {
    "GPT-NeoX": GPT_NEOX,
    "torchtune": TORCHTUNE,
    "verl": VERL,
    "Megatron-LM": MEGATRON,
    "NeMo": NEMO,
    "NeMo AutoModel": AUTOMODEL,
    "Megatron-Bridge": BRIDGE,
    "nanotron": NANOTRON,
    "LLaMA-Factory 1": FACTORY_1,
    "LitGPT": LITGPT,
    "OLMo": OLMO,
    "fairseq": FAIRSEQ,
    "ms-swift's Megatron": MEGATRON_SWIFT,
    "open-instruct": OPEN_INSTRUCT,
    "Weights & Biases": WANDB,
}
"""YAML, or JSON, which is YAML too."""
