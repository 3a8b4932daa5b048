"""Checkpoints and models that the tests of exports begin with."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unishard.checkpoint import manifest, tensor_names, writing
from unishard.checkpoint.export.models import stored_assets
from unishard.checkpoint.export.sources import tensors_of
from unishard.checkpoint.hashing import hexadecimal
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard


def stretches_of(module: nn.Module) -> dict[str, LazyShard]:
    """As an engine that shards nothing holds them: each tensor once, under its first name."""
    first = {id(tensor): name for name, tensor in reversed(tensors_of(module).items())}
    return {
        name: lazy_shard_of(Shard(tensor.shape, tensor))
        for name, tensor in tensors_of(module).items()
        if first[id(tensor)] == name
    }


def cut(tensors: Mapping[str, LazyShard], rank: int, world: int, whole: tuple[str, ...] = ()) -> dict[str, LazyShard]:
    """What one of several ranks holds: cut anywhere, within rows; some tensors whole on every rank."""
    out = {}
    for index, (name, stretch) in enumerate(tensors.items()):
        if name in whole:
            out[name] = stretch
            continue
        cuts = [
            min(stretch.end, stretch.end * at // world + (index % 3 if 0 < at < world else 0))
            for at in range(world + 1)
        ]
        out[name] = stretch._replace(start=cuts[rank], end=cuts[rank + 1])
    return out


def checkpoint(folder: Path, module: nn.Module, assets: bool = True) -> Path:
    """A complete checkpoint of a model, as one process writes it."""
    tensors = {tensor_names.PARAMETERS + name: stretch for name, stretch in stretches_of(module).items()}
    written = writing.write(folder, tensors)
    assert written is not None
    files = dict(written.files)
    for name, data in stored_assets(module, stretches_of(module)).items() if assets else ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        files[name] = (len(data), zlib.crc32(data))
    facts = manifest.Manifest(
        written="2026-01-01T00:00:00Z",
        versions={},
        step=1,
        world_size=1,
        model=manifest.ModelRecord(class_name=type(module).__name__, fingerprint="", numel=1),
        files={name: manifest.FileFacts(bytes=size, crc32=f"{crc:08x}") for name, (size, crc) in files.items()},
        tensors={
            name: manifest.TensorFacts(
                shape=list(written.shapes[name]), dtype=written.dtypes[name], hash=hexadecimal(each)
            )
            for name, each in written.hashes.items()
        },
    )
    (folder / manifest.FILE).write_text(facts.model_dump_json())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors_in(folder: Path, pattern: str = "*.safetensors") -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob(pattern)) for name, tensor in load_file(path).items()}


def tiny(kind: str, **changes: Any) -> Any:
    """A small model of transformers with weights that bf16 rounds."""
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "Llama": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "Bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        "DeepSeek": {
            "hidden_size": 32,
            "intermediate_size": 24,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "Mixtral": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 2,
        },
    }
    heads = {
        "Llama": "LlamaForCausalLM",
        "T5": "T5ForConditionalGeneration",
        "GPT2": "GPT2LMHeadModel",
        "Bert": "BertForMaskedLM",
        "DeepSeek": "DeepseekV3ForCausalLM",
        "Mixtral": "MixtralForCausalLM",
    }
    config = getattr(transformers, f"{kind.replace('DeepSeek', 'DeepseekV3')}Config")(
        vocab_size=37, **(sizes[kind] | changes)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, heads[kind])(config)


def adapted(base: Any, **changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    given = {
        "r": 3,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "init_lora_weights": False,
    } | changes
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(1)
        return get_peft_model(base, LoraConfig(**given))
