"""Files that hold TrainingArguments among other keys: LLaMA-Factory's, TRL's and the like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.key_rows import beyond_fields, boolean, degree, drops, integer, one_of, refuses
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import DEEPSPEED, off
from unishard.formats.hf.quantizing import KEYS as QUANTIZED
from unishard.formats.hf.quantizing import read_arguments
from unishard.formats.names import each, ignored, names

SURE = "per_device_train_batch_size"
"""An argument that no other tool has, by which a section that holds TrainingArguments is known, whatever its name."""


def with_script_defaults(keys: Mapping[str, Key], data: Mapping[str, Any]) -> Mapping[str, Key]:
    """The rows with what the file's script assumes; those that the script says nothing about stay."""
    silent = _silent(data)
    return {name: row._replace(tool_default=silent[name]) if name in silent else row for name, row in keys.items()}


LLAMAFACTORY: Mapping[str, Any] = {"disable_gradient_checkpointing": False}
"""What LLaMA-Factory assumes."""


def _silent(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return LLAMAFACTORY if "finetuning_type" in data and "stage" in data else {}


_SIGNS = names(
    "model model_name_or_path model_type model_id dataset dataset_name dataset_dir datasets template "
    "stage finetuning_type lora_rank lora_r lora_alpha lora_target lora_target_modules "
    "cutoff_len max_length max_seq_length max_samples torch_dtype dtype tokenizer_name_or_path tokenizer use_peft "
    "attn_implementation dataset_mixture dataset_mixer dataset_splits dataset_config dataset_config_name "
    "dataset_train_split dataset_text_field dataset_path dataset_id_or_path train_dataset train_file validation_file "
    "data_path data_args model_args script_args model_name tokenizer_name chat_template chat_template_path "
    "max_prompt_length max_completion_length num_generations reward_funcs reward_weights use_vllm beta loss_type "
    "precompute_ref_log_probs dataset_num_proc dataset_kwargs packing model_init_kwargs load_in_4bit load_in_8bit "
    "model_max_length max_source_length max_target_length max_train_samples max_eval_samples preprocessing_num_workers "
    "text_column task_name source_lang image_column_name audio_column_name"
)
"""Keys that a file of only TrainingArguments does not have: one of them shows that a script reads more from the
file."""

_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


PRECISION = ("precision.compute", "precision.master", "precision.reduce")
_ADAPTERS = names("use_peft lora_r lora_rank lora_alpha lora_target lora_target_modules load_in_4bit load_in_8bit")


def _dtype(value: Any, document: DocumentValues) -> KeyEffect:
    """`dtype`, once `torch_dtype`: without bf16 and fp16 that of the weights that train. DeepSpeed makes fp32 masters
    of them, and PEFT fp32 adapters.
    """
    dtype = _DTYPES.get(str(value).removeprefix("torch.").lower())
    if dtype is None or not (off(document.get("bf16")) and off(document.get("fp16"))):
        return left_out("the dtype in which the training script loads the model")
    masters = any(not off(document.get(name)) for name in (DEEPSPEED, *_ADAPTERS))
    note = "without bf16 and fp16 the model trains in the dtype in which the script loads it"
    fields = dict.fromkeys(PRECISION[:1] if masters else PRECISION, dtype)
    return KeyEffect(Fit.EQUIVALENT, note, fields, copy_verbatim=True)


def _pure(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("is off")
    return KeyEffect(fields=dict.fromkeys(PRECISION, "bf16"), copy_verbatim=True)


def _recomputes(value: Any, document: DocumentValues) -> KeyEffect:
    """LLaMA-Factory checkpoints every layer unless this is true."""
    return KeyEffect(fields={"activation_checkpointing": "none" if boolean(value) else "full"}, copy_verbatim=True)


_ON_DISK = "activations lie in host memory, not in files: the same losses"


def _offloads(value: Any, document: DocumentValues) -> KeyEffect:
    """TRL's switch; Axolotl also has words for it."""
    choice = str(value).lower()
    if choice == "disk":
        return KeyEffect(Fit.EQUIVALENT, _ON_DISK, {"offload.activations": "cpu"}, copy_verbatim=True)
    on = choice == "legacy" or boolean(value if value is not None else False)
    return KeyEffect(fields={"offload.activations": "cpu" if on else "none"}, copy_verbatim=True)


_SURELY = 5
_WHOLE = "layers that are split between ranks are not supported; write 1 and use fsdp or deepspeed"
_DEGREES: Mapping[str, str] = {
    **each(
        "pipeline_model_parallel_size context_parallel_size pipeline_parallel_size "
        "virtual_pipeline_model_parallel_size",
        _WHOLE,
    ),
}
_KERNELS = "other kernels and collectives: the same math"
SHARING, MODE = "sequence_parallel_size", "sequence_parallel_mode"
_MODES = {"zigzag-ring": "allgather", "ulysses": "ulysses"}
_PASSED = "keys and values are gathered at once, not passed from rank to rank: the same math, other traffic"


_LOADS = "names the model and how it is loaded, which the training script does"
_SHARDS = "distributed_config tp_plan tp_size"


def _loaded(value: Any, document: DocumentValues) -> KeyEffect:
    """TRL's arguments of `from_pretrained`."""
    if shards := [name for name in names(_SHARDS) if isinstance(value, Mapping) and not off(value.get(name))]:
        instead = "write sharding.strategy, parallel.tensor for tp_size, parallel.expert for ep_size"
        return KeyEffect(Fit.UNSUPPORTED, f"{shards[0]} shards the model while it is loaded; {instead}")
    return left_out(_LOADS)


def _shared(value: Any, document: DocumentValues) -> KeyEffect:
    """360-LLaMA-Factory's key: its own attention, and the loss of all tokens."""
    if off(value) or integer(1)(value) == 1:
        return left_out("is off")
    mode = one_of(_MODES)(document.get(MODE) or "zigzag-ring")
    fields = {"parallel.sequence.size": integer(1)(value), "parallel.sequence.method": mode}
    return KeyEffect(Fit.EXACT, "", fields, copy_verbatim=True)


def _mode(value: Any, document: DocumentValues) -> KeyEffect:
    method = one_of(_MODES)(value)
    if off(document.get(SHARING)) or document.get(SHARING) in (1, "1"):
        return left_out(f"only used with {SHARING}")
    return KeyEffect(Fit.EXACT if method == "ulysses" else Fit.EQUIVALENT, _PASSED, copy_verbatim=True)


DIALECT: Mapping[str, Key] = {
    **ignored("hf/ignored_around.txt"),
    **dict.fromkeys(("dtype", "torch_dtype"), Key(_dtype, PRECISION)),
    "pure_bf16": Key(_pure, PRECISION),
    "fp8": refuses("fp8 is not supported; write bf16", off),
    "fp8_backend": drops("names what fp8 switches on"),
    "fp8_enable_fsdp_float8_all_gather": drops("names what fp8 switches on"),
    **{
        f"use_{name.lower().replace('-', '_')}": refuses(
            f"{name} is not supported; build the optimizer in the training script", off
        )
        for name in ("GaLore", "BAdam", "APOLLO", "Adam-mini", "Muon")
    },
    **QUANTIZED,
    **{name: refuses(why, lambda value: off(value) or str(value) == "1") for name, why in _DEGREES.items()},
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size"), degree("parallel.tensor.size", _KERNELS)),
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size"), degree("parallel.expert.size", _KERNELS)),
    "model_init_kwargs": beyond_fields(Key(_loaded, (), Fit.IGNORED, _LOADS)),
    SHARING: Key(_shared, ("parallel.sequence.size", "parallel.sequence.method")),
    MODE: Key(_mode, (), Fit.EQUIVALENT, _PASSED),
    "disable_gradient_checkpointing": Key(_recomputes, ("activation_checkpointing",)),
    "activation_offloading": Key(_offloads, ("offload.activations",)),
    "loraplus_lr_ratio": refuses("gives LoRA's B matrices another rate; write optimizer.groups instead", off),
}


def bare(data: Mapping[str, Any], own: Iterable[str]) -> bool:
    """Whether a document is a file that `fsdp_config` names: its keys with nothing around."""
    keys = [str(key).removeprefix("fsdp_") for key in data if not str(key).startswith("_")]
    known = set(own)
    return bool(keys) and not {"fsdp", "fsdp_config"} & set(data) and sum(key in known for key in keys) * 2 >= len(keys)


def section_in(data: Mapping[str, Any]) -> str | None:
    """The section of a script's own file that holds TrainingArguments; None where they stand at the top, or nowhere."""
    sections = [name for name, inner in data.items() if isinstance(inner, Mapping) and SURE in inner]
    return sections[0] if len(sections) == 1 and SURE not in data else None


def arguments_in(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """TrainingArguments of a document, which may stand in a section of it."""
    name = section_in(data)
    return data if name is None else data[name]


def wrapped(data: Mapping[str, Any]) -> bool:
    """Whether a script reads more from the document than TrainingArguments."""
    return any(key in data for key in _SIGNS) or any(str(key).startswith("_") for key in data)


def sure(data: Mapping[str, Any], arguments: Iterable[str]) -> bool:
    """Whether a document has TrainingArguments for certain, however many keys the script around them adds."""
    inner = arguments_in(data)
    return SURE in inner and len(set(inner) & set(arguments)) >= _SURELY


_SCRIPTS = "not a TrainingArguments key: only the script around it reads it"


def of_script(value: Any, document: DocumentValues) -> KeyEffect:
    """What a part of the file means that only the script reads: nothing, unless it says how the base is quantized."""
    if arguments := _quantized(value):
        return read_arguments(arguments, document)
    return KeyEffect(Fit.IGNORED, _SCRIPTS, beyond_fields=True, copy_verbatim=True, unknown=True)


def _quantized(value: Any) -> Mapping[str, Any] | None:
    """The mapping in a value that has the arguments of BitsAndBytesConfig."""
    if not isinstance(value, Mapping):
        return None
    if any(not off(value.get(name)) for name in ("load_in_4bit", "load_in_8bit")):
        return None if off(value.get("enabled", True)) else value
    return next(filter(None, map(_quantized, value.values())), None)


_AROUND = Key(of_script, (), Fit.IGNORED, _SCRIPTS)


def around(data: Mapping[str, Any], keys: Mapping[str, Key], arguments: Mapping[str, Key]) -> Mapping[str, Key]:
    """Rows for the keys of a wrapped document that are unknown, except those that only misspell an argument that
    trains.
    """
    known = [name for name, row in arguments.items() if row.fields]
    strange = [str(key) for key in data if str(key) not in keys]
    return {key: _AROUND for key in strange if not _misspells(key, known)}


def _misspells(key: str, known: list[str]) -> bool:
    """Whether a key looks like an argument, and not like one with a word in front, such as `eval_generation_config`."""
    near = get_close_matches(key, known, 1, 0.85)
    return bool(near) and not key.endswith(f"_{near[0]}")
