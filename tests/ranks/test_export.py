"""What engines export is to the byte what one process exports of the same model, whoever holds which part."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from playing import STRATEGIES, config, my_rank, play, values
from torch import nn

import unishard
from unishard.checkpoint.lazy_shards import lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.export.online import export
from unishard.export.sources import sources_of, tensors_of
from unishard.testing.cells import BACKENDS
from unishard.testing.features.lora import lora
from unishard.testing.models import llama

CELLS = tuple((backend, strategy) for backend in BACKENDS for strategy in STRATEGIES)
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
    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 1, "num_attention_heads": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2))


MODELS = {"llama": frozen_llama, "lora": lora, "mixtral": mixtral}
RUNS = tuple((model, *cell) for model in MODELS for cell in CELLS if model != "mixtral" or cell[1] == "full_shard")


def held(engine):
    """What this rank holds of every tensor, by its first name."""
    found = {}
    for name, tensor in tensors_of(engine.module).items():
        if sources_of(engine.module)[name] == name:
            part = engine._adapter.master_shard(tensor) if isinstance(tensor, nn.Parameter) else Shard(tensor.shape, tensor)
            found[name] = lazy_shard_of(part)
    return found


def exported(model, backend, strategy, folder):
    out = Path(folder) / f"{model}-{backend}-{strategy}"
    with unishard.prepare(MODELS[model](), config(backend, strategy)) as engine:
        export(out, engine.module, held(engine), dtype="bf16", max_shard_size="30KB")


def one_rank_cannot_write(backend, folder):
    with unishard.prepare(llama(), config(backend)) as engine:
        parts = held(engine)
        if my_rank() == 1:
            name = next(iter(parts))
            parts[name] = parts[name]._replace(read=lambda begin, end: 1 / 0)
        export(Path(folder) / f"broken-{backend}", engine.module, parts)


SCENARIOS = (
    *((exported, (*run, FOLDER)) for run in RUNS),
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
        first = {source: lazy_shard_of(Shard(tensors[source].shape, tensors[source])) for source in sources_of(model).values()}
        export(Path(FOLDER) / name, model, first, dtype="bf16", max_shard_size="30KB")
        found[name] = files(Path(FOLDER) / name)
    return found


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_engine_and_strategy_writes_the_same_bytes(run, expected):
    values(play(SCENARIOS)[exported, (*run, FOLDER)])
    found, wanted = files(Path(FOLDER) / "-".join(run)), expected[run[0]]
    assert {name for name in found if found[name] != wanted.get(name)} == set()
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_ends_the_export_on_all_and_leaves_nothing(backend):
    outcomes = play(SCENARIOS)[one_rank_cannot_write, (backend, FOLDER)]
    assert [outcome.error[0] for outcome in outcomes] == ["CheckpointError", "ZeroDivisionError"]
    assert outcomes[0].error[1].startswith("rank 1: ZeroDivisionError")
    assert not [path.name for path in Path(FOLDER).iterdir() if "broken" in path.name]
