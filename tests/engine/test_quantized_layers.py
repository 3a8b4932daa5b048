"""Weights in few bits: the bytes are those of bitsandbytes, and what cannot be quantized is one clear error."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import unishard
from unishard.config import Quantization
from unishard.engine.model.facts import check_model
from unishard.engine.model.quantization import requirements
from unishard.engine.model.quantization.adoption import adopt, description_of
from unishard.engine.model.quantization.four_bit import FourBit
from unishard.engine.model.quantization.linear import QuantizedLinear, quantized_layers
from unishard.engine.model.quantization.loading import quantize, storage_of
from unishard.errors import ConfigError, ModelError
from unishard.testing.features.quantization import quantized_by_bitsandbytes
from unishard.testing.models import llama
from unishard.tools.plan.model import PlannedModel

WAYS = [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False)]
SHAPE = (42, 150)  # neither its elements nor its scales fill their last block


def section(word, double=False, **more):
    return Quantization.model_validate({"type": word, **({"double_quantization": True} if double else {}), **more})


def weight():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def adopted(word, double, **layer):
    """What becomes of a layer of bitsandbytes."""
    from bitsandbytes import nn as layers

    model = nn.Sequential(nn.Linear(*SHAPE[::-1], bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight())
    if layer:
        made = layers.Linear4bit(*SHAPE[::-1], bias=False, compress_statistics=double, quant_type=word, **layer)
        made.weight = layers.Params4bit(weight(), compress_statistics=double, quant_type=word, module=made, **layer).to(
            "cpu"
        )
        model[0] = made
    else:
        quantized_by_bitsandbytes(model, word, double=double)
    theirs = model[0].weight.data.clone()
    adopt(model)
    return model[0], theirs


@pytest.mark.parametrize(("word", "double"), WAYS)
def test_the_parts_that_ranks_read_are_the_bytes_that_bitsandbytes_makes(word, double):
    layer, _ = adopted(word, double)
    whole = weight().reshape(-1)
    readers = storage_of(SHAPE, section(word, double)).readers(lambda begin, end: whole[begin:end])
    for read, parameter in zip(readers, (layer.quantized, layer.scales), strict=True):
        size = parameter.numel()
        for parts in (1, 3, 7):
            step = -(-size // parts)
            pieces = [read(begin, min(begin + step, size)) for begin in range(0, size, step)]
            assert torch.equal(torch.cat(pieces), parameter.data)


def test_bytes_that_bitsandbytes_keeps_in_a_floating_dtype_are_the_same():
    (layer, _), (stored, theirs) = adopted("nf4", True), adopted("nf4", True, quant_storage=torch.bfloat16)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(layer.quantized, stored.quantized)
    assert torch.equal(layer.scales, stored.scales)


@pytest.mark.parametrize(("word", "double"), WAYS)
def test_a_layer_computes_as_that_of_bitsandbytes_and_no_cast_reaches_its_bytes(word, double):
    torch.manual_seed(1)
    theirs = quantized_by_bitsandbytes(llama(intermediate_size=42), word, double=double)
    ours = quantized_by_bitsandbytes(llama(intermediate_size=42), word, double=double)
    adopt(ours)
    tokens = torch.arange(24).view(2, 12)
    for model in (theirs, ours):
        model.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)
        model.train()
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (theirs, ours)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    gradients = [model.model.embed_tokens.weight.grad for model in (theirs, ours)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    before = {name: each.clone() for name, each in ours.named_parameters() if each.dtype == torch.uint8}
    ours.to(torch.bfloat16).eval()(input_ids=tokens)  # where bitsandbytes may lay weights out anew
    assert before
    assert all(torch.equal(ours.get_parameter(name), each) for name, each in before.items())


def test_the_head_and_what_a_pattern_matches_are_left_out():
    model = llama()
    quantize(model, section("nf4"))
    layers = dict(quantized_layers(model))
    assert len(layers) == 14
    assert type(model.lm_head) is nn.Linear
    model = llama()
    quantize(model, section("nf4", skip_modules=["mlp", r"0\.self_attn\.q"]))
    assert len(dict(quantized_layers(model))) == 8  # the head too, and 7 of attention
    assert isinstance(model.lm_head, QuantizedLinear)
    with pytest.raises(ConfigError, match=r"'mpl' matches no linear layer; .*model\.layers\.0\.self_attn\.q_proj"):
        quantize(llama(), section("nf4", skip_modules=["mpl"]))


def test_double_quantization_takes_the_bits_that_the_schema_says():
    for double, bits in ((False, 4.5), (True, 4.13)):
        storage = storage_of((4096, 4096), section("nf4", double))
        assert 8 * sum(storage.sizes) / storage.numel == pytest.approx(bits, abs=0.005)


def test_a_quantized_model_without_adapters_has_nothing_to_train():
    model = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4")
    adopt(model)
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="are frozen; unfreeze the ones to train"):
        check_model(model)


def test_other_quantized_layers_of_bitsandbytes_are_refused_by_name():
    from bitsandbytes.nn import Embedding4bit

    model = nn.ModuleDict({"table": Embedding4bit(16, 64)}).to("cpu")
    with pytest.raises(ModelError, match=r"table of ModuleDict .*Embedding4bit.*llm_int8_skip_modules"):
        adopt(model)


def test_ranks_without_the_data_of_bitsandbytes_are_told_apart_from_those_with_it():
    model = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4")
    subject = "data of the layers of bitsandbytes"
    assert description_of(llama()) == {}
    assert description_of(model) == {subject: "present"}
    # As unishard.init leaves the parameters that a loader registers on the other ranks.
    meta = torch.empty_like(model.model.layers[1].mlp.up_proj.weight, device="meta")
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(meta, requires_grad=False)
    assert description_of(model)[subject].startswith("absent, as unishard.init leaves it; load the model outside of it")


def test_a_plan_counts_the_bytes_that_layers_of_bitsandbytes_are_taken_over_with(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llama(intermediate_size=42).config.save_pretrained(tmp_path)
    model = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4", double=True)
    adopt(model)
    cfg = unishard.load({"quantization": {"type": "nf4", "double_quantization": True}})
    planned = PlannedModel(str(tmp_path), cfg).shape
    assert {each.name: each.nbytes for each in planned.parameters} == {
        name: each.nbytes for name, each in model.named_parameters()
    }
    assert not planned.trainable


def test_a_config_that_is_not_what_the_model_holds_is_refused():
    topology = unishard.Topology()
    with pytest.raises(ConfigError, match=r"quantization\.type: is nf4, and LlamaForCausalLM has no quantized layers"):
        requirements.check_quantized(llama(), section("nf4"), topology)
    model = quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4")
    adopt(model)
    with pytest.raises(ConfigError, match=r"the model has nf4 in .* this config says nf4 with double_quantization"):
        requirements.check_quantized(model, section("nf4", double=True), topology)
    requirements.check_quantized(model, section("none"), topology)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    cfg = unishard.load({"quantization": "nf4"})
    with pytest.raises(ConfigError, match=r"nf4 needs bitsandbytes, .* pip install 'unishard\[quantization\]'"):
        unishard.from_pretrained(type(llama()), "folder", cfg)
    assert importlib.util.find_spec("bitsandbytes")


def test_a_device_without_kernels_is_named(monkeypatch):
    def product(self, *tensors):
        raise NotImplementedError("no kernel for this device\nand more")

    monkeypatch.setattr(FourBit, "product", product)
    message = r"nf4 does not run on cpu with bitsandbytes [\d.]+ \(no kernel for this device\); install"
    with pytest.raises(ConfigError, match=message):
        requirements.require_device(storage_of(SHAPE, section("nf4")), torch.device("cpu"))
