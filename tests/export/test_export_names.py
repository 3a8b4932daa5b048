"""An export has the tensors of `save_pretrained`, and the libraries load it, whatever the model is made of."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exporting import adapted, checkpoint, contents, stretches_of, tensors_in, tiny
from torch import nn

from unishard.checkpoint.export.assets import Assets
from unishard.checkpoint.export.models import assets_of
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.export.online import export
from unishard.checkpoint.export.sources import persistent_buffers, tensors_of
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed.dtypes import DTYPES
from unishard.errors import BackendError, CheckpointError

MODELS = {
    "llama": lambda: tiny("Llama", tie_word_embeddings=False),
    "llama, tied": lambda: tiny("Llama", tie_word_embeddings=True),
    "t5": lambda: tiny("T5"),
    "gpt2": lambda: tiny("GPT2"),
    "bert": lambda: tiny("Bert"),
    "mixtral": lambda: tiny("Mixtral"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_tensors_are_those_of_save_pretrained_and_transformers_loads_them(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out", "bf16")
    model.bfloat16().save_pretrained(tmp_path / "theirs")
    expected, found = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    for name in contents(tmp_path / "theirs").keys() - {"model.safetensors"}:
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        ), name
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_class_that_writes_more_itself_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Chatty(type(tiny("Llama"))):  # type: ignore[misc]
        def save_pretrained(self, folder: str, **options: object) -> None:
            super().save_pretrained(folder, **options)
            Path(folder, "more.json").write_text("{}")

    for model in (Chatty(tiny("Llama").config), tiny("Llama"), Chatty(tiny("Llama").config)):
        assets_of(model, stretches_of(model))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "Chatty.save_pretrained replaces that of transformers, and an export does not call it"
    )


@pytest.mark.parametrize(
    "changes", [{}, {"modules_to_save": None, "use_dora": True}, {"target_modules": ["embed_tokens", "lm_head"]}]
)
def test_adapters_are_those_of_peft(changes: dict[str, object], tmp_path: Path) -> None:
    from peft import PeftModel

    if "target_modules" in changes:
        changes = changes | {"modules_to_save": None}
    model = adapted(tiny("Llama"), **changes)
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs")
    expected, found = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(tensor.numel() for tensor in found.values())
    configs = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("out", "theirs")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(tiny("Llama"), tmp_path / "out")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_every_adapter_has_its_own_folder(tmp_path: Path) -> None:
    from peft import LoraConfig

    model = adapted(tiny("Llama"), modules_to_save=None)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs")
    for folder in (".", "other"):
        expected, found = (tensors_in(tmp_path / each / folder) for each in ("theirs", "out"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "out" / "other" / "adapter_config.json").is_file()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((3,), 0.1, dtype=torch.bfloat16), requires_grad=False)
        self.one = nn.Linear(3, 5, bias=False)
        self.other = nn.Linear(3, 5, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def test_a_plain_module_keeps_its_own_names_and_what_has_no_dimensions(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    model = Odd()
    layout = export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out", "fp16")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == {"scale", "frozen", "one.weight", "count", "mask"}
    assert found["scale"].shape == ()
    assert found["scale"].dtype == torch.float16
    assert found["frozen"].tolist() == model.frozen.half().tolist()
    assert (found["count"].dtype, found["count"].item(), found["mask"].tolist()) == (torch.int64, 7, [True, False])
    assert layout.bare
    load_model(model, tmp_path / "out" / "model.safetensors")


def test_without_the_private_name_only_a_model_with_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(CORE_PRIVATE_API["buffers-in-files"], names=("torch.nn:Module._another_set",))
    monkeypatch.setattr("unishard.checkpoint.export.sources._PATCH", gone)
    linear = nn.Linear(3, 5)
    assert tensors_of(linear).keys() == {"weight", "bias"}
    assert persistent_buffers(linear) == {}
    for find in (tensors_of, persistent_buffers):
        with pytest.raises(
            BackendError, match=r"^A checkpoint or an export of a model that has buffers, .*needs Module\._another_set "
        ):
            find(nn.Sequential(linear, Odd()))


def test_persistent_buffers_have_every_name_that_a_state_dict_has() -> None:
    model = nn.Sequential(Odd(), nn.BatchNorm1d(5))
    model.append(model[0])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
    assert [(name, id(tensor)) for name, tensor in tensors_of(model).items()] == expected
    found = [(name, id(buffer)) for name, buffer in persistent_buffers(model).items()]
    assert found == [(name, tensor) for name, tensor in expected if name not in parameters]


def test_a_tie_that_no_config_knows_is_exported_under_both_names(tmp_path: Path) -> None:
    model = tiny("Llama", tie_word_embeddings=False)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    export(tmp_path / "out", model, stretches_of(model))
    found = tensors_in(tmp_path / "out")
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], found["model.layers.0.mlp.up_proj.weight"])
    type(model).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("operation", ["transposed", "failing"])
def test_a_model_whose_files_hold_other_values_is_saved_but_not_exported(operation: str, tmp_path: Path) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    model = tiny("Llama")
    transpose = Transpose(0, 1 if operation == "transposed" else 7)
    model._weight_conversions = [WeightConverter("up.weight", "up_proj.weight", operations=[transpose])]
    folder = checkpoint(tmp_path / "here", model)
    with pytest.raises(
        CheckpointError,
        match=r"LlamaForCausalLM: transformers computes it when it saves.*; load the checkpoint's tensors",
    ):
        export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_transformers_renames_when_it_saves_are_renamed(tmp_path: Path) -> None:
    from transformers.core_model_loading import WeightRenaming

    model = tiny("Llama")
    model._weight_conversions = [WeightRenaming(r"old_norm\.", r"norm.")]
    model.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "out", model, stretches_of(model))
    assert tensors_in(tmp_path / "out").keys() == tensors_in(tmp_path / "theirs").keys()
    assert "model.old_norm.weight" in tensors_in(tmp_path / "out")


def test_tensors_that_transformers_joins_when_it_saves_are_joined(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    model = tiny("Llama", num_key_value_heads=2)
    parts = ["q_proj", "k_proj", "v_proj"]
    model._weight_conversions = [
        WeightConverter("attn.Wqkv", [f"self_attn.{part}" for part in parts], operations=[Chunk(dim=0)])
    ]
    model.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "out", model, stretches_of(model))
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "offline")
    theirs = (tmp_path / "theirs" / "model.safetensors").read_bytes()
    assert "model.layers.0.attn.Wqkv.weight" in tensors_in(tmp_path / "out")
    assert [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "offline")] == [theirs, theirs]


def test_columns_that_transformers_joins_are_refused(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    model = tiny("Llama")
    model._weight_conversions = [
        WeightConverter("mlp.both", ["mlp.up_proj", "mlp.gate_proj"], operations=[Chunk(dim=1)])
    ]
    with pytest.raises(
        CheckpointError, match=r"mlp\.both\.weight of LlamaForCausalLM: transformers computes it when it saves"
    ):
        export(tmp_path / "out", model, stretches_of(model))


def test_a_conversion_that_changes_values_is_refused(tmp_path: Path) -> None:
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            (tensors,) = input_dict.values()
            return {target_patterns[0]: tensors[0].mul_(2)}

        @property
        def reverse_op(self):
            return self

    model = tiny("Llama")
    model._weight_conversions = [WeightConverter("up.weight", "up_proj.weight", operations=[Doubled()])]
    with pytest.raises(
        CheckpointError, match=r"up\.weight of LlamaForCausalLM: transformers computes it when it saves"
    ):
        export(tmp_path / "out", model, stretches_of(model))


def test_a_conversion_asks_for_whole_shapes_where_a_rank_has_parts(tmp_path: Path) -> None:
    """As that of Qwen3-VL-MoE, which transposes experts of other shapes than the model's."""
    from transformers.core_model_loading import Transpose, WeightConverter

    model = tiny("Mixtral")
    names = "mlp.experts.down_proj"
    model._weight_conversions = [WeightConverter(names, names, operations=[Transpose(1, 2, check_dims=True)])]
    model.save_pretrained(tmp_path / "theirs")
    held = stretches_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.new_empty(0)
    export(tmp_path / "out", model, held)
    expected, found = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tensor_that_the_caller_leaves_out_is_named(tmp_path: Path) -> None:
    for model, name in ((tiny("Llama"), "lm_head.weight"), (nn.Linear(2, 2), "bias")):
        held = {key: stretch for key, stretch in stretches_of(model).items() if key != name}
        with pytest.raises(
            CheckpointError, match=rf"{name} cannot be exported: it is not among the {len(held)} available tensors"
        ):
            export(tmp_path / "out", model, held)


@pytest.mark.parametrize(
    ("kind", "dtype", "part"), [("T5", "fp16", "wo"), ("DeepSeek", "bf16", "e_score_correction_bias")]
)
def test_what_the_class_keeps_in_fp32_is_not_rounded(kind: str, dtype: str, part: str, tmp_path: Path) -> None:
    model = tiny(kind)
    for name, tensor in model.state_dict().items():
        if part in name:
            tensor.copy_(torch.linspace(6.8, 7.1, tensor.numel()).view(tensor.shape))
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "offline", dtype)
    export(tmp_path / "online", model, stretches_of(model), dtype=dtype)
    model.save_pretrained(tmp_path / "fp32")
    type(model).from_pretrained(tmp_path / "fp32", dtype=DTYPES[dtype]).save_pretrained(tmp_path / "theirs")
    expected = tensors_in(tmp_path / "theirs")
    assert {tensor.dtype for name, tensor in expected.items() if part in name} == {torch.float32}
    for out in ("offline", "online"):
        found = tensors_in(tmp_path / out)
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            name: tensor.dtype for name, tensor in expected.items()
        }
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("config.json", "to_json_string"),
        ("generation_config.json", "to_json_string"),
        ("the tokenizer", "_name_or_path"),
    ],
)
def test_a_file_beside_the_weights_that_cannot_be_made_is_named_and_left_out(
    part: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("Llama")
    whole = contents(export_checkpoint_of(model, tmp_path / "before"))
    (tmp_path / "origin").mkdir()
    (tmp_path / "elsewhere.json").write_text("{}")
    (tmp_path / "origin/tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    if part == "the tokenizer":
        model.config._name_or_path = str(tmp_path / "origin")
    else:
        owner = type(model.config if part == "config.json" else model.generation_config)
        monkeypatch.setattr(owner, method, lambda *args, **more: {}[part])
    with caplog.at_level("WARNING", "unishard"):
        left = contents(export_checkpoint_of(model, tmp_path / "after"))
    assert left == {name: data for name, data in whole.items() if name != part}
    (told,) = warned(caplog)
    assert told.startswith(f"{part} is missing in checkpoints and exports: ")
    assert str(tmp_path / "origin") in told if part == "the tokenizer" else told.endswith(f"KeyError: '{part}'")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "unishard" and record.levelname == "WARNING"]


def export_checkpoint_of(model: nn.Module, folder: Path) -> Path:
    """The export of a model, and that of its checkpoint, which has the same files."""
    export(folder / "online", model, stretches_of(model))
    export_checkpoint(checkpoint(folder / "here", model), folder / "offline")
    assert contents(folder / "online") == contents(folder / "offline")
    return folder / "online"


def test_a_checkpoint_is_complete_where_what_an_export_needs_cannot_be_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("Llama")
    model._keys_to_ignore_on_save = 5
    with caplog.at_level("WARNING", "unishard"):
        folder = checkpoint(tmp_path / "here", model)
    told = "LlamaForCausalLM cannot be exported from the checkpoint: TypeError: "
    assert [each[: len(told)] for each in warned(caplog)] == [told]
    with pytest.raises(
        CheckpointError, match=r"LlamaForCausalLM cannot be exported .*; .* unishard checkpoint export --model"
    ):
        export_checkpoint(folder, tmp_path / "out")


def test_prompts_that_peft_computes_are_refused_with_a_way_out(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny("Llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(
        CheckpointError, match=r"'default' .* is computed when it is saved.*; load the checkpoint into the model"
    ):
        export(tmp_path / "out", model, stretches_of(model))


def test_assets_come_back_out_of_their_files() -> None:
    for model, file in ((adapted(tiny("Llama")), "adapter_config.json"), (tiny("Mixtral"), "generation_config.json")):
        assets = assets_of(model, stretches_of(model))
        assert Assets.from_files(assets.to_files()) == assets
        assert {f"assets/{file}", "assets/export.json"} <= assets.to_files().keys()


@pytest.mark.parametrize(
    "files",
    [
        {"assets/export.json": b'{"kind": "plain", "names": {"../elsewhere": {"a": "a"}}}'},
        {"assets/export.json": b'{"kind": "plain", "names": {"/elsewhere": {"a": "a"}}}'},
        {"assets/export.json": b'{"kind": "plain", "names": {"elsewhere\\u0000": {"a": "a"}}}'},
        {"assets/export.json": b'{"kind": "plain", "names": {}}', "assets/../../elsewhere": b""},
    ],
)
def test_assets_do_not_write_outside_their_folder(files: dict[str, bytes]) -> None:
    with pytest.raises(CheckpointError, match=r"elsewhere.*' lies outside the folder; do not trust this checkpoint"):
        Assets.from_files(files)


@pytest.mark.parametrize(
    "text", [b"{", b'{"kind": "other", "names": {}}', b'{"kind": "plain", "names": {}, "more": 1}', b"\xff"]
)
def test_damaged_names_are_an_error(text: bytes) -> None:
    with pytest.raises(
        CheckpointError, match=r"assets/export\.json: .*; the file is damaged, or was written by a later version"
    ):
        Assets.from_files({"assets/export.json": text})


def test_adapters_that_transformers_has_put_in_are_those_it_saves(tmp_path: Path) -> None:
    from peft import LoraConfig

    model = tiny("Llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs")
    expected, found = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = tiny("Llama")
    loaded.load_adapter(str(tmp_path / "out"))
    assert torch.equal(
        loaded.model.layers[0].self_attn.v_proj.lora_B.default.weight,
        model.model.layers[0].self_attn.v_proj.lora_B.default.weight,
    )


def test_an_adapter_on_a_model_of_the_hub_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def asked(*given: object, **more: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.file_exists", asked)
    monkeypatch.setattr(huggingface_hub.HfApi, "file_exists", asked)
    model = adapted(tiny("Llama"))
    model.peft_config["default"].base_model_name_or_path = "somebody/some-model"
    export(tmp_path / "out", model, stretches_of(model))
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "somebody/some-model"
    )
    assert len(tensors_in(tmp_path / "out")) == 9
