"""Transformers models read from safetensors as they are sharded."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from harness import config, error, my_rank, own_share, play, train, values
from harness import refused as refused_by
from safetensors.torch import load_file, save_file

import unishard
from unishard.engine.model.weight_sources import sources_of
from unishard.testing.cells import BACKENDS
from unishard.testing.models import llama

_kept = []


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 97,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "d_ff": 41, "num_layers": 2, "num_heads": 3}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


EXPERTS = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    sizes = EXPERTS | {"intermediate_size": 40, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    sizes = EXPERTS | {"moe_intermediate_size": 8, "num_key_value_heads": 1, "num_experts": 12, "head_dim": 8}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, num_experts_per_tok=2, mlp_only_layers=[0], intermediate_size=19)
    )


SAVED = {
    "llama": (llama, "30KB"),
    "llama bf16": (lambda: llama().bfloat16(), "10MB"),
    "tied llama": (lambda: llama(tie_word_embeddings=True), "10MB"),
    "gpt2": (gpt2, "40KB"),
    "t5": (t5, "40KB"),
    "base": (lambda: llama().model, "10MB"),
    "mixtral": (mixtral, "40KB"),
    "qwen3 moe": (lambda: qwen3_moe().bfloat16(), "10MB"),
}


@cache
def folder():
    """Every model, saved once in a session."""
    where = TemporaryDirectory()
    _kept.append(where)
    for name, (build, size) in SAVED.items():
        build().save_pretrained(Path(where.name) / name, max_shard_size=size)
    pickled = Path(where.name) / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((Path(where.name) / "llama" / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    own_code = Path(where.name) / "own code"
    own_code.mkdir()
    (own_code / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"}}
        )
    )
    (own_code / "code.py").write_text("raise SystemExit('was run')")
    mixtral().save_pretrained(Path(where.name) / "lacking", max_shard_size="10MB")
    saved = Path(where.name) / "lacking" / "model.safetensors"
    kept = load_file(saved)
    kept.pop("model.layers.0.block_sparse_moe.experts.2.w1.weight")
    save_file(kept, saved, {"format": "pt"})
    return where.name


def inputs(name):
    return [{"input_ids": batch["input_ids"], "labels": batch["labels"]} for batch in own_share(3, "llama")]


def both_ways(backend, name, where, precision, trained):
    """Losses and norms of a model from transformers' own loader and from ours, and what ours left on the ranks before
    prepare."""
    answers = []
    cls = type(SAVED[name][0]())
    cfg = config(backend, precision=precision)
    path = os.path.join(where, name)
    plain = cls.from_pretrained(path, dtype=torch.float32)
    ours = unishard.from_pretrained(cls, path, cfg)
    empty = all(parameter.is_meta for parameter in ours.parameters())
    buffers = [(key, buffer.tolist()) for key, buffer in ours.named_buffers()] == [
        (key, buffer.tolist()) for key, buffer in plain.named_buffers()
    ]
    ties = [len({id(p) for _, p in model.named_parameters(remove_duplicate=False)}) for model in (plain, ours)]
    for model in (plain, ours):
        with unishard.prepare(model, cfg, train=trained) as engine:
            assert engine.module.training is trained  # transformers leaves it in evaluation mode
            if trained:
                engine.train()
                answers.append([(loss, step.grad_norm) for loss, step in train(engine, inputs(name))])
            else:
                answers.append([engine(**batch).loss.item() for batch in inputs(name)])
    return answers, empty, buffers, ties


def adapted(model):
    """With LoRA adapters, the same on every call."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def adapters(backend, where):
    """Losses and norms of LoRA on a pretrained model, built plainly and inside init, and why not on one from our
    loader."""
    from transformers import LlamaForCausalLM

    cfg, path, answers = config(backend), os.path.join(where, "llama"), []

    def built():
        return adapted(LlamaForCausalLM.from_pretrained(path, dtype=torch.float32))

    plain = built()
    with unishard.init(cfg):
        lean = built()
    for model in (plain, lean):
        with unishard.prepare(model, cfg) as engine:
            engine.train()
            answers.append([(loss, step.grad_norm) for loss, step in train(engine, inputs("llama"))])
    with pytest.raises(unishard.ModelError) as refusal:
        unishard.prepare(adapted(unishard.from_pretrained(LlamaForCausalLM, path, cfg)), cfg)
    return answers, str(refusal.value)


def by_auto_class(backend, where):
    """The class that an Auto class finds, whether a losses equal those of the class itself, and what trusting is."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    cfg, path, losses = config(backend), os.path.join(where, "llama"), []
    for cls in (AutoModelForCausalLM, LlamaForCausalLM):
        model = unishard.from_pretrained(cls, path, cfg, attn_implementation="eager")
        found = type(model).__name__, model.config._attn_implementation
        early = refused_by(model, **inputs("llama")[0])
        with unishard.prepare(model, cfg, train=False) as engine:
            losses.append([engine(**batch).loss.item() for batch in inputs("llama")])
    trusting = refused_by(unishard.from_pretrained, AutoModelForCausalLM, path, cfg, trust_remote_code=True)
    return found, losses, trusting, early


def refused(backend, cls, name, where):
    import transformers

    found = getattr(transformers, cls, None) or torch.nn.Linear
    unishard.from_pretrained(found, os.path.join(where, name), config(backend))


CASES = [
    *(("full_shard", name, "fp32", True) for name in ("llama", "llama bf16", "tied llama", "gpt2", "t5")),
    ("full_shard", "t5", "bf16", True),
    ("full_shard", "gpt2", "bf16", False),
    ("full_shard", "mixtral", "fp32", True),
    ("full_shard", "qwen3 moe", "fp32", True),
    ("full_shard", "qwen3 moe", "bf16", False),
]
REFUSED = {
    (
        "Linear",
        "llama",
    ): "needs a model class of transformers, such as AutoModelForCausalLM, got 'Linear'; build any other model inside",
    ("AutoTokenizer", "llama"): "got 'AutoTokenizer'",
    ("AutoModelForCausalLM", "t5"): "AutoModelForCausalLM cannot be built (Unrecognized configuration class",
    ("AutoModelForCausalLM", "own code"): "transformers cannot read it (The repository",
    (
        "LlamaForCausalLM",
        "base",
    ): "does not contain a LlamaForCausalLM: missing from the files: lm_head.weight; load it with the class",
    ("LlamaModel", "llama"): "does not contain a LlamaModel: only in the files: lm_head.weight",
    (
        "LlamaForCausalLM",
        "pickled",
    ): "contains pytorch_model.bin but no safetensors, and loading a pickle can run code; if you trust it, convert it",
    ("LlamaForCausalLM", "nowhere"): "config.json not found; pass a directory written by save_pretrained",
    (
        "MixtralForCausalLM",
        "lacking",
    ): "cannot make model.layers.0.mlp.experts.gate_up_proj of MixtralForCausalLM from model.layers.0.block_sparse_moe",
}


IN_TURNS = [(BACKENDS[number % 2], case) for number, case in enumerate(CASES)]
"""An engine for each case: what it holds is read by one loader for both."""


def played(backend):
    scenarios = [
        (both_ways, (backend, name, folder(), precision, trained))
        for on, (_, name, precision, trained) in IN_TURNS
        if on == backend
    ]
    scenarios += [(adapters, (backend, folder())), (by_auto_class, (backend, folder()))]
    scenarios += [(refused, (backend, *case, folder())) for case in REFUSED if backend == "fsdp"]
    return play(tuple(scenarios))


@pytest.mark.parametrize(
    ("backend", "case"),
    IN_TURNS,
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each[1:])).replace(" ", "_"),
)
def test_the_same_as_transformers_own_loader_without_holding_it(backend, case):
    _, name, precision, trained = case
    for (plain, ours), empty, buffers, ties in values(
        played(backend)[both_ways, (backend, name, folder(), precision, trained)]
    ):
        assert ours == plain
        assert empty
        assert buffers
        assert ties[0] == ties[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_on_a_pretrained_model_train_alike_inside_init_which_an_error_points_to(backend):
    for (plain, lean), refusal in values(played(backend)[adapters, (backend, folder())]):
        assert lean == plain
        assert plain[0] != plain[1]
        assert "build all of it inside unishard.init(cfg) instead" in refusal


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_auto_class_loads_the_class_of_the_config_and_trusts_no_code(backend):
    for found, (by_auto, by_class), trusting, early in values(played(backend)[by_auto_class, (backend, folder())]):
        assert found == ("LlamaForCausalLM", "eager")
        assert by_auto == by_class
        assert "never runs code of a folder; leave trust_remote_code out" in trusting
        assert (
            "from unishard.from_pretrained ran before unishard.prepare, which reads its weights; call engine" in early
        )


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_cannot_be_loaded_is_one_clear_error_on_every_rank(case):
    raised = error(played("fsdp")[refused, ("fsdp", *case, folder())])
    assert raised.startswith("ModelError: ")
    assert REFUSED[case] in raised


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    from transformers import LlamaForCausalLM

    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 43}))
    with pytest.raises(unishard.ModelError, match=re.escape("mlp.down_proj.weight has the shape (24, 41), and")):
        unishard.from_pretrained(LlamaForCausalLM, tmp_path, config("fsdp"))


def dinov2():
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    return Dinov2Model(Dinov2Config(**sizes, use_swiglu_ffn=True))


@pytest.mark.parametrize("build", [mixtral, qwen3_moe, dinov2], ids=lambda build: build.__name__)
def test_any_part_of_a_joined_or_divided_tensor_can_be_read(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in saved.items()}
    expected = type(model).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    sources = sources_of(model, shapes, lambda key, begin, end: saved[key].reshape(-1)[begin:end])
    assert sources.keys() == expected.keys()
    assert len(expected) != len(saved)
    for name, tensor in expected.items():
        flat = tensor.reshape(-1)
        assert sources[name].shape == tuple(tensor.shape)
        for begin, end in ((0, len(flat)), (len(flat) // 3, len(flat) // 3 + 2), (len(flat) // 2, len(flat))):
            assert torch.equal(sources[name].read(begin, end), flat[begin:end]), name


# -- what each rank reads --------------------------------------------------------------------------


class CountedFile:
    """An open safetensors file that counts the bytes of tensor data that are read."""

    def __init__(self, opened, read):
        self._opened, self._read = opened, read

    def __enter__(self):
        return CountedFile(self._opened.__enter__(), self._read)

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._opened, name)

    def get_tensor(self, key):
        found = self._opened.get_tensor(key)
        self._read.append(found.nbytes)
        return found

    def get_slice(self, key):
        return CountedSlice(self._opened.get_slice(key), self._read)


class CountedSlice:
    def __init__(self, part, read):
        self._part, self._read = part, read

    def __getitem__(self, rows):
        found = self._part[rows]
        self._read.append(found.nbytes)
        return found

    def __getattr__(self, name):
        return getattr(self._part, name)


def counted(backend, sharding, trained, name, where):
    """Bytes that this rank reads of a model's files, those of the whole model, and whether the weights are those in the
    files."""
    import safetensors

    cls = type(SAVED[name][0]())
    cfg, read, plain = config(backend, sharding, precision="fp32"), [], safetensors.safe_open
    path = os.path.join(where, name)
    full = cls.from_pretrained(path, dtype=torch.float32).state_dict()
    safetensors.safe_open = lambda *rest, **more: CountedFile(plain(*rest, **more), read)
    try:
        with unishard.prepare(unishard.from_pretrained(cls, path, cfg), cfg, train=trained) as engine:
            right = all(
                torch.equal(engine.weights.read(name).cpu(), full[name]) for name, _ in engine.module.named_parameters()
            )
    finally:
        safetensors.safe_open = plain
    return sum(read), sum(value.nbytes for value in full.values()), right


def differing(where):
    """The error where the second rank has other weights in files of the same size and header."""
    from transformers import LlamaForCausalLM

    path = Path(where) / ("llama bf16" if my_rank() == 0 else "other")
    return refused_by(unishard.from_pretrained, LlamaForCausalLM, path, config("fsdp"))


def test_files_that_differ_between_ranks_are_refused():
    path = Path(folder())
    if not (path / "other").exists():
        shutil.copytree(path / "llama bf16", path / "other")
        file = path / "other" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    for told in values(play(((differing, (folder(),)),))[differing, (folder(),)]):
        assert told.startswith("RankMismatchError: ranks hold different files in")
        assert "model.safetensors: rank 0 has" in told


READ = [
    ("fsdp", "full_shard", "llama"),
    ("fsdp", "no_shard", "llama"),
    ("fsdp", "full_shard", "mixtral"),
    ("deepspeed", "full_shard", "llama"),
    ("deepspeed", "shard_grad_op", "llama"),
    ("deepspeed", "full_shard", "mixtral"),
]


@pytest.mark.parametrize("trained", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("backend", "sharding", "name"), READ)
def test_each_rank_reads_only_what_it_keeps(backend, sharding, name, trained):
    cases = [each for each in READ if each[0] == backend]
    played_here = play(
        tuple((counted, (each[0], each[1], train, each[2], folder())) for each in cases for train in (True, False))
    )
    (first, whole, right), (second, _, right_too) = values(
        played_here[counted, (backend, sharding, trained, name, folder())]
    )
    assert right
    assert right_too
    if sharding == "full_shard":
        assert first + second < 1.2 * whole  # rows that two ranks keep a part of are read by both
        assert max(first, second) < 0.65 * whole
    else:  # rank 0 reads and broadcasts: all ranks keep all of it
        assert (first, second) == (whole, 0)
