"""What engines export is to the byte what one process exports of the same model, whoever holds which part."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from harness import BACKENDS, PAIRS, config, my_rank, play, values
from safetensors.torch import load_file
from torch import nn

import unishard
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.export.online import export
from unishard.checkpoint.export.sources import sources_of, tensors_of
from unishard.distributed.lazy_shards import lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.testing.features.lora import lora
from unishard.testing.models import llama

CELLS = PAIRS
_where = TemporaryDirectory()
FOLDER = _where.name


def frozen_llama():
    """Tied, with a frozen part in a format of its own and a buffer that is saved."""
    model = llama(tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    model.model.norm.bfloat16()
    model.model.register_buffer("seen", model.model.norm.weight.new_tensor([3, 4]).long())
    return model


def mixtral():
    """Its files hold every expert alone."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2))


def gpt_neox():
    """Its files name tensors by the name of its class."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))


def classifier():
    """Adapters and a head that is trained in full, which peft asks for its state dict."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(
            LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=3)),
            LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]),
        )


def own_code():
    """Its files have its code, and what its class keeps in fp32."""
    from dev.models.own_code import OwnConfig, OwnForCausalLM

    torch.manual_seed(1)
    model = OwnForCausalLM(OwnConfig())
    model._keep_in_fp32_modules_strict = {"head.bias"}
    return model


MODELS = {
    "llama": frozen_llama,
    "lora": lora,
    "mixtral": mixtral,
    "gpt_neox": gpt_neox,
    "classifier": classifier,
    "own_code": own_code,
}
IN_ALL = ("llama", "lora")
"""Exported under every strategy; others, which differ in their names, under one."""
RUNS = tuple((model, *cell) for model in MODELS for cell in CELLS if model in IN_ALL or cell[1] == "full_shard")


def held(engine):
    """What this rank holds of every tensor, by its first name."""
    found = {}
    for name, tensor in tensors_of(engine.module).items():
        if sources_of(engine.module)[name] == name:
            part = (
                engine._adapter.master_shard(tensor)
                if isinstance(tensor, nn.Parameter)
                else Shard(tensor.shape, tensor)
            )
            found[name] = lazy_shard_of(part)
    return found


def exported(model, backend, strategy, folder):
    out = Path(folder) / f"{model}-{backend}-{strategy}"
    with unishard.prepare(MODELS[model](), config(backend, strategy)) as engine:
        export(out, engine.module, held(engine), dtype="bf16", max_shard_size="30KB")


def saved(model, backend, folder):
    """A checkpoint, exported, what its engine exports, and the dtypes of what it streams."""
    root = Path(folder) / f"saved-{model}-{backend}"
    with unishard.prepare(MODELS[model](), config(backend)) as engine:
        where = engine.save(root / "checkpoints")
        engine.export(root / "online", dtype="bf16")
        streamed = {name: weight.dtype for name, weight in engine.weights.stream(dtype="bf16")}
        assert streamed == {
            name: weight.dtype for name, weight in engine.weights.state_dict(dtype="bf16", all_ranks=True).items()
        }
    if my_rank() == 0:
        export_checkpoint(where, root / "offline", dtype="bf16")
    return streamed


def one_rank_cannot_write(backend, folder):
    with unishard.prepare(llama(), config(backend)) as engine:
        parts = held(engine)
        if my_rank() == 1:
            name = next(iter(parts))
            parts[name] = parts[name]._replace(read=lambda begin, end: 1 / 0)
        export(Path(folder) / f"broken-{backend}", engine.module, parts)


SCENARIOS = (
    *((exported, (*run, FOLDER)) for run in RUNS),
    *((saved, (model, backend, FOLDER)) for model in ("classifier", "own_code") for backend in BACKENDS),
    *((one_rank_cannot_write, (backend, FOLDER)) for backend in BACKENDS),
)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected():
    found = {}
    for name, make in MODELS.items():
        model = make()
        tensors = tensors_of(model)
        first = {
            source: lazy_shard_of(Shard(tensors[source].shape, tensors[source]))
            for source in sources_of(model).values()
        }
        export(Path(FOLDER) / name, model, first, dtype="bf16", max_shard_size="30KB")
        found[name] = files(Path(FOLDER) / name)
    return found


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_engine_and_strategy_writes_the_same_bytes(run, expected):
    values(play(SCENARIOS)[exported, (*run, FOLDER)])
    found, wanted = files(Path(FOLDER) / "-".join(run)), expected[run[0]]
    assert {name for name in found if found[name] != wanted.get(name)} == set()
    assert found.keys() == wanted.keys()


def test_names_are_those_of_the_plain_class(expected):
    assert b"embed_out.weight" in expected["gpt_neox"]["model.safetensors"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_classifiers_adapter_is_that_of_peft_from_the_engine_and_from_its_checkpoint(backend, tmp_path):
    values(play(SCENARIOS)[saved, ("classifier", backend, FOLDER)])
    classifier().bfloat16().save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "adapter_model.safetensors")
    for out in ("online", "offline"):
        found = load_file(Path(FOLDER) / f"saved-classifier-{backend}" / out / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_code_of_its_own_has_the_files_of_save_pretrained_and_keeps_what_its_class_keeps(
    backend, tmp_path
):
    streamed = values(play(SCENARIOS)[saved, ("own_code", backend, FOLDER)])[0]
    model = own_code().bfloat16()
    model.head.bias.data = own_code().head.bias.data
    model.save_pretrained(tmp_path)
    for out in ("online", "offline"):
        assert files(Path(FOLDER) / f"saved-own_code-{backend}" / out) == files(tmp_path)
    assert streamed == {name: tensor.dtype for name, tensor in load_file(tmp_path / "model.safetensors").items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_ends_the_export_on_all_and_leaves_nothing(backend):
    outcomes = play(SCENARIOS)[one_rank_cannot_write, (backend, FOLDER)]
    assert [outcome.error[0] for outcome in outcomes] == ["CheckpointError", "ZeroDivisionError"]
    assert outcomes[0].error[1].startswith("rank 1: ZeroDivisionError")
    assert not [path.name for path in Path(FOLDER).iterdir() if "broken" in path.name]
