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
from harness import BACKENDS, config, my_rank, own_share, play, refused, train, values

import unishard
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


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2))


SAVED = {
    "llama": (llama, "30KB"),
    "llama bf16": (lambda: llama().bfloat16(), "10MB"),
    "tied llama": (lambda: llama(tie_word_embeddings=True), "10MB"),
    "gpt2": (gpt2, "40KB"),
    "t5": (t5, "40KB"),
    "base": (lambda: llama().model, "10MB"),
    "mixtral": (mixtral, "10MB"),
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
    assert all(parameter.is_meta for parameter in ours.parameters())
    buffers = [{key: buffer.tolist() for key, buffer in model.named_buffers()} for model in (plain, ours)]
    ties = [len({id(p) for _, p in model.named_parameters(remove_duplicate=False)}) for model in (plain, ours)]
    for model in (plain, ours):
        with unishard.prepare(model, cfg, train=trained) as engine:
            assert engine.module.training is trained  # transformers leaves it in evaluation mode
            if trained:
                engine.train()
                answers.append([(loss, step.grad_norm) for loss, step in train(engine, inputs(name))])
            else:
                answers.append([engine(**batch).loss.item() for batch in inputs(name)])
    assert answers[0] == answers[1]
    assert buffers[0] == buffers[1]
    assert ties[0] == ties[1]


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
    plain, lean = answers
    assert lean == plain
    assert plain[0] != plain[1]
    told = refused(unishard.prepare, adapted(unishard.from_pretrained(LlamaForCausalLM, path, cfg)), cfg)
    assert told.startswith("ModelError: ")
    assert "build all of it inside unishard.init(cfg) instead" in told


CASES = [
    *(("full_shard", name, "fp32", True) for name in ("llama", "llama bf16", "tied llama", "gpt2", "t5")),
    ("full_shard", "t5", "bf16", True),
    ("full_shard", "gpt2", "bf16", False),
]
REFUSED = {
    (
        "Linear",
        "llama",
    ): "needs a model class of transformers, such as LlamaForCausalLM, got 'Linear'; build any other model inside",
    ("AutoModelForCausalLM", "llama"): "got 'AutoModelForCausalLM'",
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
    ("MixtralForCausalLM", "mixtral"): "of MixtralForCausalLM from several tensors (",
}


def played(backend):
    scenarios = [(both_ways, (backend, name, folder(), precision, trained)) for _, name, precision, trained in CASES]
    return play((*scenarios, (adapters, (backend, folder()))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[1:])).replace(" ", "_"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_as_transformers_own_loader_without_holding_it(backend, case):
    _, name, precision, trained = case
    values(played(backend)[both_ways, (backend, name, folder(), precision, trained)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_on_a_pretrained_model_train_alike_inside_init_which_an_error_points_to(backend):
    values(played(backend)[adapters, (backend, folder())])


def loaded(backend, cls, name, where):
    """What `from_pretrained` says."""
    import transformers

    found = getattr(transformers, cls, None) or torch.nn.Linear
    return refused(unishard.from_pretrained, found, os.path.join(where, name), config(backend))


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_loaded_is_one_clear_error_on_every_rank(backend, case):
    played = play(tuple((loaded, (backend, *each, folder())) for each in REFUSED))
    raised, other = values(played[loaded, (backend, *case, folder())])
    assert raised == other
    assert raised.startswith("ModelError: ")
    assert REFUSED[case] in raised


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    from transformers import LlamaForCausalLM

    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 43}))
    with pytest.raises(unishard.ModelError, match=re.escape("mlp.down_proj.weight has the shape (24, 41), and")):
        unishard.from_pretrained(LlamaForCausalLM, tmp_path, config("fsdp"))


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


def counted(backend, sharding, trained, where):
    """Bytes that this rank reads of a model's files, those of the whole model, and whether the weights are those in the
    files."""
    import safetensors
    from transformers import LlamaForCausalLM

    cfg, read, plain = config(backend, sharding, precision="fp32"), [], safetensors.safe_open
    path = os.path.join(where, "llama")
    full = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    safetensors.safe_open = lambda *rest, **more: CountedFile(plain(*rest, **more), read)
    try:
        with unishard.prepare(unishard.from_pretrained(LlamaForCausalLM, path, cfg), cfg, train=trained) as engine:
            right = all(
                torch.equal(engine.parameter(name).cpu(), full[name]) for name, _ in engine.module.named_parameters()
            )
    finally:
        safetensors.safe_open = plain
    return sum(read), sum(value.nbytes for value in full.values()), right


def differing(where):
    """The error where the second rank has other weights in files of the same size and header."""
    from transformers import LlamaForCausalLM

    path = Path(where) / ("llama bf16" if my_rank() == 0 else "other")
    return refused(unishard.from_pretrained, LlamaForCausalLM, path, config("fsdp"))


def test_files_that_differ_between_ranks_are_refused():
    path = Path(folder())
    if not (path / "other").exists():
        shutil.copytree(path / "llama bf16", path / "other")
        file = path / "other" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    for told in values(play(((differing, (folder(),)),))[differing, (folder(),)]):
        assert told.startswith("RankMismatchError: ranks hold different files in")
        assert "model.safetensors: rank 0 has" in told


READ = [("fsdp", "full_shard"), ("fsdp", "no_shard"), ("deepspeed", "full_shard"), ("deepspeed", "shard_grad_op")]


@pytest.mark.parametrize("trained", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("backend", "sharding"), READ)
def test_each_rank_reads_only_what_it_keeps(backend, sharding, trained):
    cases = [each for each in READ if each[0] == backend]
    played_here = play(tuple((counted, (*each, train, folder())) for each in cases for train in (True, False)))
    (first, whole, right), (second, _, right_too) = values(played_here[counted, (backend, sharding, trained, folder())])
    assert right
    assert right_too
    if sharding == "full_shard":
        assert first + second < 1.2 * whole  # rows that two ranks keep a part of are read by both
        assert max(first, second) < 0.65 * whole
    else:  # rank 0 reads and broadcasts: all ranks keep all of it
        assert (first, second) == (whole, 0)
