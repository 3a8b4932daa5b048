"""Units are found on any module: repeated blocks, named classes, sizes, ties."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from unishard.config import Sharding
from unishard.engine.model.units import find_units
from unishard.errors import ModelError


def names(model: nn.Module, **sharding: object) -> list[str]:
    return [unit.name for unit in find_units(model, Sharding.model_validate(sharding))]


def llama(*, tie: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, width, 3))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(4), Residual(4))
        self.layer2 = nn.Sequential(Residual(4))
        self.head = nn.Linear(4, 2)


class Relative(nn.Module):
    """Its forward reads the weight of one embedding, through a method, and only the dtype of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.distances = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens).to(self.words.weight.dtype)
        for block in self.blocks:
            hidden = block(hidden) @ self.all_distances().T
        return hidden

    def all_distances(self) -> torch.Tensor:
        return self.distances.weight


def test_an_embedding_whose_weight_another_forward_reads_is_no_unit() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Relative()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens)

    assert names(Outer()) == ["inner.words", "inner.blocks.0", "inner.blocks.1"]


def test_llama_has_its_blocks_and_its_embedding() -> None:
    assert names(llama()) == ["model.embed_tokens", "model.layers.0", "model.layers.1"]


def test_a_tied_embedding_stays_with_the_head_in_the_root() -> None:
    assert names(llama(tie=True)) == ["model.layers.0", "model.layers.1"]


def test_named_classes_are_taken_alone() -> None:
    assert names(llama(), units=["LlamaMLP"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_a_named_class_that_lies_only_inside_another_is_an_error() -> None:
    with pytest.raises(ModelError, match="every LlamaMLP lies inside another unit; remove it"):
        names(llama(), units=["LlamaDecoderLayer", "LlamaMLP"])


def test_a_named_class_whose_weights_are_tied_outside_is_an_error() -> None:
    with pytest.raises(ModelError, match="every Embedding shares a weight with a module outside it"):
        names(llama(tie=True), units=["LlamaDecoderLayer", "Embedding"])


def test_a_list_of_modules_is_no_unit() -> None:
    with pytest.raises(
        ModelError, match=r"model\.layers is a ModuleList, which has no forward; name the class of its elements"
    ):
        names(llama(), units=["ModuleList"])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), ["0", "2"]),
        (nn.Linear(3, 5), []),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
            ["layers.0", "layers.1", "layers.2"],
        ),
        (ResNet(), ["layer1.0", "layer1.1", "layer2.0"]),
    ],
    ids=["mlp", "one layer", "transformer encoder", "resnet"],
)
def test_plain_modules(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


def test_hugging_face_families() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    assert names(gpt2) == ["transformer.wpe", "transformer.h.0", "transformer.h.1"]  # wte is tied to lm_head
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2))
    assert names(t5) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]  # shared is tied
    vit = ViTModel(
        ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
        )
    )
    assert len(names(vit)) >= 2
    assert all(type(unit.module).__name__ in vit._no_split_modules for unit in find_units(vit, Sharding()))
    bert = BertForMaskedLM(
        BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    )
    assert "bert.encoder.layer.0" in names(bert)
    assert "bert.embeddings.word_embeddings" not in names(bert)  # tied to the prediction head


def test_units_never_overlap_and_never_share_a_parameter_with_the_outside() -> None:
    for model in (llama(tie=True), llama(), ResNet()):
        units = find_units(model, Sharding())
        owned = [id(parameter) for unit in units for parameter in unit.module.parameters()]
        assert len(owned) == len(set(owned))
        outside = [
            p
            for n, p in model.named_parameters(remove_duplicate=False)
            if not any(n.startswith(f"{u.name}.") for u in units)
        ]
        assert not set(owned) & {id(parameter) for parameter in outside}


def test_small_units_join_what_is_around_them() -> None:
    sizes = {unit.name: unit.numel for unit in find_units(llama(), Sharding())}
    assert names(llama(), min_unit_params=sizes["model.embed_tokens"] + 1) == ["model.layers.0", "model.layers.1"]


def test_a_size_that_leaves_no_unit_is_an_error_with_the_candidates() -> None:
    with pytest.raises(
        ModelError,
        match=r"min_unit_params: 10,000,000 is larger than every unit; the candidates are model\.embed_tokens",
    ):
        names(llama(), min_unit_params=10_000_000)


def test_a_class_that_matches_nothing_is_an_error_with_the_candidates() -> None:
    with pytest.raises(
        ModelError, match=r"no module of class LlamaDecoderLayr in LlamaForCausalLM; .*LlamaDecoderLayer \(x2"
    ) as error:
        names(llama(), units=["LlamaDecoderLayr"])
    assert "did you mean LlamaDecoderLayer?" in str(error.value)


def test_units_survive_meta_models() -> None:
    with torch.device("meta"):
        model = llama()
    assert names(model) == names(llama())


def test_an_embedding_with_a_hook_may_compute_with_its_weight() -> None:
    plain, hooked, normed = (nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)) for _ in range(3))
    hooked[0].register_forward_hook(lambda module, args, output: output * module.weight.mean())
    normed[0] = nn.utils.spectral_norm(normed[0])
    assert [find_units(model, Sharding())[0].is_embedding for model in (plain, hooked, normed)] == [True, False, False]
