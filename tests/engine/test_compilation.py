"""Blocks are compiled once for all layers, also for a model that makes a key-value cache; the limit of torch is
told."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from unishard.config import Compile
from unishard.contract.units import Unit
from unishard.engine.model import compilation

# torch looks at `.grad` of what it traces and hides the warning in a way that filters of pytest undo.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python"),
]
LAYERS = 12
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument and the output; transformers renamed both in 5.24."""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, attn_implementation="sdpa", **sizes))
    assert model.config.use_cache
    return model


@pytest.fixture
def compiled(monkeypatch):
    """The model with its blocks compiled, and what counts their graphs."""
    torch._dynamo.reset()
    model, counter = llama(), CompileCounterWithBackend("eager")
    section = Compile(mode="per_block")
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, **options | {"backend": counter})
    )
    compilation.apply([Unit(f"model.layers.{index}", layer) for index, layer in enumerate(model.model.layers)], section)
    yield model, counter
    torch._dynamo.reset()


TOKENS = torch.arange(8).view(1, 8)


def test_a_model_with_a_cache_is_one_graph_in_training(compiled, caplog):
    model, counter = compiled
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert counter.frame_count == 1
    assert torch.equal(loss, llama()(input_ids=TOKENS, labels=TOKENS).loss)
    assert not [record for record in caplog.records if record.name == "unishard"]


def test_generating_keeps_its_cache_and_makes_no_graphs(compiled):
    model, counter = compiled
    model.eval()
    wanted = llama().eval().generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=4, do_sample=False), wanted)
    with torch.no_grad():
        assert cache_in(model(input_ids=TOKENS)).get_seq_length() == 8
    assert counter.frame_count == 0


def test_a_cache_that_is_filled_already_counts_in_training(compiled):
    model, _ = compiled
    plain = llama()
    with torch.no_grad():
        prefix = cache_in(plain(input_ids=TOKENS))
    assert isinstance(prefix, DynamicCache)
    wanted = plain(input_ids=TOKENS[:, :2], **{CACHE: prefix.__class__(prefix_of(prefix))}).logits
    assert torch.allclose(model(input_ids=TOKENS[:, :2], **{CACHE: prefix}).logits, wanted, atol=1e-6)


def cache_in(output):
    return output[CACHE]


def prefix_of(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


class Scaled(torch.nn.Module):
    def forward(self, x, by):
        return x * by


def test_that_torch_stops_compiling_a_function_of_the_model_is_told_once(caplog):
    torch._dynamo.reset()
    model = Scaled()
    compilation.apply([Unit("", model)], Compile(mode="full", backend="eager"))
    elsewhere = torch.compile(eval(compile("lambda x, by: x + by", "an_engine.py", "eval")), backend="eager")
    with caplog.at_level(logging.WARNING, logger="unishard"):
        for length in range(2, 14):
            other = torch.ones([1] * length)  # another number of dimensions is another graph
            model(torch.ones(2), other)
            elsewhere(torch.ones(2), other)
    torch._dynamo.reset()
    told = [record.getMessage() for record in caplog.records if record.name == "unishard"]
    assert len(told) == 1
    assert told[0].startswith("torch.compile made 8 graphs of 'forward' (")
    assert "raise torch.compiler.config.recompile_limit" in told[0]
