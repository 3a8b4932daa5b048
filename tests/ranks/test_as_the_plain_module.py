"""What a model's code asks about itself has the same answer on each engine: its class, whether it is sharded, a part's
weight."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from harness import BACKENDS, config, my_rank, play, values

import unishard

UPDATES, RATE = 3, 0.1


def recording():
    """A model that finds by the name of its class what it records."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4), add_pooling_layer=False)


def recorded(backend):
    with unishard.prepare(recording(), config(backend)) as engine:
        engine.eval()
        with torch.no_grad():
            out = engine(torch.ones(1, 3, 8, 8), output_hidden_states=True)
        return type(engine.module).__name__, len(out.hidden_states)


def speech():
    """Each rank draws which layers it skips."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "classifier_proj_size": 8,
    }
    front = {
        "conv_dim": (8,),
        "conv_stride": (5,),
        "conv_kernel": (10,),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    }
    drops = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
    )
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            vocab_size=37, **sizes, **front, **drops, num_feat_extract_layers=1, layerdrop=0.5, apply_spec_augment=False
        )
    )


def deberta():
    """Reads `rel_embeddings.weight` in the encoder."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"), 0.0)
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(
            vocab_size=37,
            **sizes,
            **drops,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
        )
    )


def adapted(**changes):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=37, **sizes, pad_token_id=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(
            model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False, **changes)
        )


def some_tokens():
    """Reads the weight of the embedding that its layer replaces."""
    return adapted(trainable_token_indices=[3, 5])


def own_embedding():
    """Its wrapper answers with the attributes of the embedding that is trained."""
    return adapted(modules_to_save=["embed_tokens", "score"])


MODELS = {
    speech: {"strategy": "full_shard", "conditional_modules": ["Wav2Vec2EncoderLayer"]},
    deberta: "full_shard",
    some_tokens: "full_shard",
    own_embedding: "full_shard",
}
CELLS = [(make, backend) for make in MODELS for backend in BACKENDS]


def seeded(make):
    torch.manual_seed(1)
    return make()


def batch(make, update, rank):
    drawn = torch.Generator().manual_seed(10 * update + rank)
    given = torch.randn(2, 200, generator=drawn) if make is speech else torch.randint(6, 37, (2, 8), generator=drawn)
    if make is not speech:
        given[:, :2] = torch.tensor([3, 5])
    return given, torch.tensor([0, 1])


def trained(make, backend, sharding=None):
    cfg = unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": sharding or MODELS[make],
            "optimizer": {"name": "sgd", "lr": RATE},
            "training": {"seed": 4},
        }
    )
    curve = []
    with unishard.prepare(seeded(make), cfg) as engine:
        for update in range(UPDATES):
            given, labels = batch(make, update, my_rank())
            loss = engine(given, labels=labels).loss
            engine.backward(loss)
            curve.append((engine.mean(loss), float(engine.step().grad_norm)))
    return curve


@cache
def plain(make):
    """One process, which draws for each rank from a generator of its own."""
    model = seeded(make).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=RATE)
    states = [torch.Generator().manual_seed(4 + rank).get_state() for rank in range(2)]
    curve = []
    for update in range(UPDATES):
        total = 0.0
        for rank in range(2):
            torch.set_rng_state(states[rank])
            given, labels = batch(make, update, rank)
            loss = model(given, labels=labels).loss / 2
            states[rank] = torch.get_rng_state()
            loss.backward()
            total += loss.item()
        curve.append(
            (total, torch.nn.utils.get_total_norm([each.grad for each in trainable if each.grad is not None]).item())
        )
        optimizer.step()
        optimizer.zero_grad()
    return curve


SCENARIOS = (
    *((recorded, (backend,)) for backend in BACKENDS),
    *((trained, cell) for cell in CELLS),
    *((trained, (speech, backend, "full_shard")) for backend in BACKENDS),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_keeps_the_name_of_its_class_and_what_it_records_by_it(backend):
    assert values(play(SCENARIOS)[recorded, (backend,)])[0] == ("ViTModel", 3)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0].__name__}-{cell[1]}")
def test_it_trains_as_in_plain_torch(cell):
    found = values(play(SCENARIOS)[trained, cell])[0]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, plain(cell[0]), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_each_rank_skips_by_chance_are_named(backend):
    for outcome in play(SCENARIOS)[trained, (speech, backend, "full_shard")]:
        assert outcome.error is not None
        assert outcome.error[0] == "RankMismatchError"
        assert "sharding.conditional_modules: add Wav2Vec2EncoderLayer" in outcome.error[1]
