"""From a checkpoint: the command, the tokenizer, the format of the model, damage; no transformers, no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exporting import checkpoint, contents, stretches_of, tensors_in, tiny
from torch import nn
from typer.testing import CliRunner

import unishard
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.export.online import export
from unishard.cli import app
from unishard.engine.model.weight_files import files_of
from unishard.errors import CheckpointError, ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "root" / "step-00000007", tiny("Llama"))


def test_the_command_exports_the_latest_of_a_folder(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "latest").write_text("step-00000007\n")
    result = CliRunner().invoke(
        app,
        [
            "checkpoint",
            "export",
            str(folder.parent),
            str(tmp_path / "out"),
            "--dtype",
            "bf16",
            "--max-shard-size",
            "4KB",
        ],
    )
    assert result.exit_code == 0, result.output
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert count > 1
    assert result.stdout.startswith(f"{tmp_path / 'out'}: {count} files of tensors, 10.2 kB in bfloat16, from {folder}")
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.bfloat16}
    again = CliRunner().invoke(
        app, ["checkpoint", "export", str(folder.parent), str(tmp_path / "out"), "--overwrite", "--dtype", "fp32"]
    )
    assert again.exit_code == 0, again.output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.float32}


def test_it_needs_neither_transformers_nor_an_engine(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom unishard.cli import app\n"
        f"app(['checkpoint', 'export', {str(folder)!r}, {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        "print([name for name in ('transformers', 'peft', 'safetensors', 'deepspeed', 'unishard.engine.engine') if "
        "name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    type(tiny("Llama")).from_pretrained(tmp_path / "out")


def test_a_tensor_that_changed_on_disk_is_named_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    values = tiny("Llama").lm_head.weight.detach().numpy().tobytes()
    data[data.index(values) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-00000007: lm_head\.weight is damaged: its hash differs"):
        export_checkpoint(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_config_that_changed_on_disk_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "assets" / "config.json"
    path.write_text(path.read_text().replace("37", "38"))
    with pytest.raises(CheckpointError, match=r"assets/config\.json: its checksum differs from the manifest"):
        export_checkpoint(folder, tmp_path / "out")


def test_a_checkpoint_of_another_tool_has_tensors_and_says_so(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "here", tiny("Llama"), assets=False)
    result = CliRunner().invoke(app, ["checkpoint", "export", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "no config.json written, because the checkpoint has none" in result.stderr
    assert tensors_in(tmp_path / "out").keys() == stretches_of(tiny("Llama")).keys()


def original(folder: Path) -> Path:
    """A model in bf16 with a tokenizer, as people download them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tiny("Llama").bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_what_was_loaded_in_bf16_is_exported_in_bf16_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    first = original(tmp_path / "first")
    model = LlamaForCausalLM.from_pretrained(first).float()
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == (first / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab == {"<unk>": 0, "a": 1, "b": 2}


def test_what_unishard_loads_for_training_keeps_its_format_and_tokenizer_too(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from unishard.checkpoint.export.models import assets_of

    cfg = unishard.Config(backend="fsdp", training={"micro_batch_size": 1})
    model = unishard.from_pretrained(LlamaForCausalLM, original(tmp_path / "first"), cfg)
    assets = assets_of(model, stretches_of(model))
    assert assets.dtype_of(None) == torch.bfloat16
    assert {"tokenizer.json", "tokenizer_config.json"} <= assets.files.keys()


def test_unishard_loads_what_it_exported(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    cfg = unishard.Config(backend="fsdp", training={"micro_batch_size": 1})
    model = tiny("Llama", tie_word_embeddings=True)
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out", "bf16", "2KB")
    loaded = unishard.from_pretrained(LlamaForCausalLM, tmp_path / "out", cfg)
    read = {
        name: parameter._unishard_reader(0, parameter.numel()).view(parameter.shape)
        for name, parameter in loaded.named_parameters()
    }  # type: ignore[attr-defined]
    assert read.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(read[name], parameter.bfloat16()) for name, parameter in model.named_parameters())


def test_a_tokenizer_may_be_given_as_an_object_or_a_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    first, model = original(tmp_path / "first"), nn.Linear(2, 2)
    tokenizer = AutoTokenizer.from_pretrained(first)
    for name, given in {"object": tokenizer, "folder": first}.items():
        export(tmp_path / name, model, stretches_of(model), tokenizer=given)
        assert AutoTokenizer.from_pretrained(tmp_path / name).vocab == tokenizer.vocab
    with pytest.raises(CheckpointError, match=r"tokenizer: got a int; pass a transformers tokenizer"):
        export(tmp_path / "none", model, stretches_of(model), tokenizer=3)


# -- of a checkpoint that says nothing of its model ------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "T5", "Mixtral"])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_a_described_model_is_exported_as_one_that_the_checkpoint_knows(
    kind: str, tie_word_embeddings: bool, tmp_path: Path
) -> None:
    model = tiny(kind, tie_word_embeddings=tie_word_embeddings)
    model.generation_config.max_new_tokens = 7
    export_checkpoint(checkpoint(tmp_path / "known", model), tmp_path / "wanted")
    origin = tmp_path / "origin"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(origin)
    model.generation_config.save_pretrained(origin)
    bare = checkpoint(tmp_path / "bare", model, assets=False)
    result = CliRunner().invoke(app, ["checkpoint", "export", str(bare), str(tmp_path / "out"), "--model", str(origin)])
    assert result.exit_code == 0, result.output
    assert not result.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    again = type(model).from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (None, "no config.json here"),
        ("{", "transformers cannot build a model from it"),
        ('{"model_type": "llama"}', "transformers cannot build a model from it"),
        ('{"model_type": "llama", "architectures": ["Missing"]}', "transformers cannot build a model from it"),
        (
            '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1}',
            "cannot be exported: it is not among",
        ),
    ],
)
def test_a_description_of_another_model_is_refused_in_one_message(
    config: str | None, what: str, tmp_path: Path
) -> None:
    bare = checkpoint(tmp_path / "bare", tiny("Llama"), assets=False)
    (tmp_path / "origin").mkdir()
    if config is not None:
        (tmp_path / "origin/config.json").write_text(config)
    result = CliRunner().invoke(
        app, ["checkpoint", "export", str(bare), str(tmp_path / "out"), "--model", str(tmp_path / "origin")]
    )
    assert result.exit_code == 2
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_place_of_a_model_is_named(folder: Path, tmp_path: Path) -> None:
    for given in (folder, folder.parent):
        with pytest.raises(
            ModelError, match=rf"it holds a checkpoint of unishard, .* `unishard checkpoint export {given} DIREC"
        ):
            files_of(given)
    with pytest.raises(ModelError, match="pass a directory written by save_pretrained"):
        files_of(tmp_path)
