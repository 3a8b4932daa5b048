"""Families of models that are built unlike Llama: what trains on one engine trains on the other, and as plain torch
does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from playing import SPANNING, STRATEGIES, config, curve, play, train, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing import oracle
from unishard.testing.cells import BACKENDS
from unishard.testing.models import MlpOutput, mlp

PLACED = ("no_shard", "shard_grad_op", "full_shard")
SIZE, TURNS, WORLD = 2, 3, 2
WORD, LENGTH = 53, 6


# -- data: each sample depends on its global index alone
# ------------------------------------------------------------------------------


def tokens(index):
    generator = torch.Generator().manual_seed(100 + index)
    return {name: torch.randint(1, WORD, (LENGTH,), generator=generator) for name in ("input_ids", "labels")}


def image(index):
    generator = torch.Generator().manual_seed(200 + index)
    return {"x": torch.randn(3, 8, 8, generator=generator), "labels": torch.tensor(index % 5)}


def features(index):
    generator = torch.Generator().manual_seed(300 + index)
    return {"x": torch.randn(LENGTH, 12, generator=generator), "labels": torch.tensor(index % 5)}


def micro_batch(sample, turn, rank):
    samples = [sample((turn * WORLD + rank) * SIZE + index) for index in range(SIZE)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def own_batches(sample):
    rank = unishard.Topology.from_environment().rank
    return [micro_batch(sample, turn, rank) for turn in range(TURNS)]


# -- models ------------------------------------------------------------------------------------------------------------


def gpt2():
    """The head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORD, n_positions=16, n_embd=12, n_layer=2, n_head=2, **dropouts))


def t5():
    """Encoder and decoder share the embedding, and all blocks of each the position bias of the first."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORD, dropout_rate=0.0, decoder_start_token_id=0, **sizes))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForMaskedLM(BertConfig(num_attention_heads=2, **COMMON, **dropouts))


COMMON = {
    "vocab_size": WORD,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}


def mixtral():
    """DeepSpeed's default makes its sparse block a leaf module."""
    from transformers import MixtralConfig, MixtralForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=4, num_experts_per_tok=2, use_cache=False, **COMMON, **heads)
    )


class Classifier(nn.Module):
    """Mean over the positions, then a linear layer."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(12, 5)

    def forward(self, x, labels):
        logits = self.head(self.body(x).mean(1))
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Stage(nn.Module):
    """A convolution, normalized."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv2d(width, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return functional.relu(self.norm(self.convolution(x)))


class Convolutional(nn.Module):
    """With BatchNorm, which normalizes by each rank's own micro-batch."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(*(Stage(width) for width in (3, 6, 6)))
        self.head = nn.Linear(6, 5)

    def forward(self, x, labels):
        logits = self.head(self.stages(x).mean((2, 3)))
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


def encoder():
    """Its attention reads the weights of a child without calling the child."""
    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
    return Classifier(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def shared_between_blocks():
    """The first and the last block have one weight in common."""
    layers = [Layer() for _ in range(4)]
    layers[3].up.weight = layers[0].up.weight
    return Classifier(nn.Sequential(*layers))


class Buffered(Layer):
    """A block that turns its input by a complex table, with a mask that is expanded and a counter of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "turn", torch.polar(torch.ones(LENGTH, 6), torch.linspace(0, 3, 6 * LENGTH).reshape(LENGTH, 6))
        )
        self.register_buffer(
            "mask", torch.tensor([1.0, 0.5]).reshape(2, 1).expand(2, 6).reshape(12)[:6].expand(LENGTH, 6)
        )
        self.register_buffer("order", torch.arange(11, -1, -1))

    def forward(self, x):
        turned = torch.view_as_complex(x.float().unflatten(-1, (6, 2))) * self.turn * self.mask
        return super().forward(torch.view_as_real(turned).flatten(-2)[..., self.order].to(x.dtype))


def odd_buffers():
    return Classifier(nn.Sequential(Buffered(), Buffered()))


def with_dropout():
    return Classifier(nn.Sequential(Layer(0.3), Layer(0.3)))


class ByMicroBatch(nn.Module):
    """What ranks do with one global batch: each part through the model on its own, then the mean."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        parts = zip(*(value.split(SIZE) for value in batch.values()), strict=True)
        losses = [self.model(**dict(zip(batch, part, strict=True))).loss for part in parts]
        return MlpOutput(torch.stack(losses).mean(), losses[0])


FAMILIES = {
    "gpt2": (gpt2, tokens),
    "t5": (t5, tokens),
    "bert": (bert, tokens),
    "mixtral": (mixtral, tokens),
    "convolutional": (Convolutional, image),
    "encoder": (encoder, features),
    "shared between blocks": (shared_between_blocks, features),
    "odd buffers": (odd_buffers, features),
    "dropout": (with_dropout, features),
}


def built(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return FAMILIES[family][0]()


def trained(backend, strategy, family):
    cfg = config(backend, strategy, training={"micro_batch_size": SIZE, "gradient_clipping": 0.5})
    with unishard.prepare(built(family), cfg) as engine:
        return curve(train(engine, own_batches(FAMILIES[family][1]))), engine.placement().units


CELLS = tuple((backend, strategy, family) for backend in BACKENDS for strategy in PLACED for family in FAMILIES)


def ran(*cell):
    found = values(play(tuple((trained, cell) for cell in CELLS))[trained, cell])
    assert found[0] == found[1]
    return found[0]


@cache
def expected(family):
    model = ByMicroBatch(built(family)) if family == "convolutional" else built(family)
    windows = [[micro_batch(FAMILIES[family][1], turn, rank) for rank in range(WORLD)] for turn in range(TURNS)]
    return oracle.train(model, windows, config("fsdp", training={"gradient_clipping": 0.5}), world=WORLD)


def assert_same(found, wanted):
    assert found.losses == pytest.approx(wanted.losses, rel=2e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=2e-5)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[2] != "dropout"], ids="-".join)
def test_a_family_trains_as_in_plain_torch(cell):
    assert_same(ran(*cell)[0], expected(cell[2]))


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[2] == "dropout"], ids="-".join)
def test_dropout_draws_the_same_on_every_strategy_of_every_engine(cell):
    found = ran(*cell)[0]
    assert_same(found, ran(*CELLS[0][:2], "dropout")[0])
    assert abs(found.losses[0] - expected("dropout").losses[0]) > 1e-6  # the ranks' seeds are their own


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_gather_the_same_units(family):
    units = ran("fsdp", "full_shard", family)[1]
    assert units
    assert ran("deepspeed", "full_shard", family)[1] == units


# -- formats of inputs in bf16
# ------------------------------------------------------------------------------------------------------


@dataclass
class Positions:
    """What a block is given beside its input."""

    table: torch.Tensor
    scale: float


class Positioned(nn.Module):
    """Adds an fp32 table before its blocks, so that hidden states are in bf16 only if they are cast at each block,
    which gets it too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 12 * LENGTH).reshape(LENGTH, 12))
        self.layers = nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x + self.table, positions=Positions(self.table, 0.5), more={"tables": [self.table]})
        logits = self.head(x.mean(1))
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Attending(Layer):
    seen = ()

    def forward(self, x, positions, more):
        given = (x, positions.table, more["tables"][0])
        out = super().forward(x + (self.up.bias.mean() * positions.scale * positions.table).to(x.dtype))
        self.seen = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (*given, out))
        return out


def positioned(backend, strategy):
    """Losses, and the formats that blocks and the caller see; then that nothing is cast once the engine is closed."""
    torch.manual_seed(11)
    engine = unishard.prepare(Positioned(), config(backend, strategy, precision="bf16"))
    done = curve(train(engine, own_batches(features)))
    output = engine(**own_batches(features)[0])
    seen = [layer.seen for layer in engine.module.layers], str(output.logits.dtype)
    engine.close()
    return done, seen, sum(len(module._forward_pre_hooks) for module in engine.module.modules())


POSITIONED = tuple((backend, strategy) for backend in BACKENDS for strategy in STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_get_their_hidden_states_in_bf16_and_tables_as_they_are_on_both_engines(strategy):
    played = play(tuple((positioned, cell) for cell in POSITIONED))
    (_, wanted, _), (done, seen, left) = (values(played[positioned, (backend, strategy)])[0] for backend in BACKENDS)
    assert seen == wanted == ([("bfloat16", "float32", "float32", "bfloat16")] * 2, "torch.bfloat16")
    assert left == 0
    assert done.losses[-1] < done.losses[0]


# -- what models and scripts do around modules
# ---------------------------------------------------------------------------------------


class Borrowing(nn.Module):
    """Uses the embedding's weight for its head, without a name for it there."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORD, 12)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, input_ids, labels):
        logits = functional.linear(self.layers(self.wte(input_ids)), self.wte.weight)
        return MlpOutput(functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits)


UNITS = {"auto": "auto", "blocks": ["Layer"]}


def borrowed(backend, units):
    torch.manual_seed(11)
    with unishard.prepare(Borrowing(), config(backend, {"strategy": "full_shard", "units": UNITS[units]})) as engine:
        return curve(train(engine, own_batches(tokens)))


def marked(backend, strategy, precision):
    """Names of the parameters that the factory finds marked, and how many it gets."""
    model, found = mlp(), []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.no_decay = name

    def build(params):
        params = list(params)
        found.extend(parameter.no_decay for parameter in params if hasattr(parameter, "no_decay"))
        found.append(len(params))
        return torch.optim.SGD(params, lr=0.1)

    with unishard.prepare(model, config(backend, strategy, precision=precision, optimizer=None), optimizer=build):
        return found


class Listening(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.heard = []

    def emit(self, record):
        self.heard.append(record.getMessage())


def listened(strategy):
    """What DeepSpeed has to say about a model without units."""
    with unishard.prepare(mlp(), config("deepspeed")):
        pass  # brings DeepSpeed's logger up
    listening = Listening()
    logging.getLogger("DeepSpeed").addHandler(listening)
    with unishard.prepare(nn.Sequential(nn.Linear(4, 4)), config("deepspeed", strategy)):
        logging.getLogger("DeepSpeed").warning("something else")
    logging.getLogger("DeepSpeed").removeHandler(listening)
    return listening.heard


def flagged(strategy):
    """A model whose author has marked a leaf for ZeRO-3, as mixture-of-experts models ask for."""
    from deepspeed.utils import set_z3_leaf_modules

    model = mlp()
    set_z3_leaf_modules(model, [type(model.blocks[0])])
    with unishard.prepare(model, config("deepspeed", strategy)) as engine:
        return engine.placement().units


AROUND = (
    *((flagged, (strategy,)) for strategy in STRATEGIES),
    *((borrowed, (backend, units)) for backend in BACKENDS for units in UNITS),
    *((marked, cell) for cell in SPANNING),
    *((listened, (strategy,)) for strategy in STRATEGIES),
)


@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_a_leaf_of_the_users_own_is_no_unit_where_deepspeed_does_not_look_at_it(strategy):
    assert values(play(AROUND)[flagged, (strategy,)]) == [(), ()]


@pytest.mark.parametrize("cell", [cell for name, cell in AROUND if name is borrowed], ids="-".join)
def test_a_weight_that_stays_with_the_root_may_be_used_anywhere(cell):
    torch.manual_seed(11)
    windows = [[micro_batch(tokens, turn, rank) for rank in range(WORLD)] for turn in range(TURNS)]
    wanted = oracle.train(Borrowing(), windows, config("fsdp"), world=WORLD)
    for found in values(play(AROUND)[borrowed, cell]):
        assert_same(found, wanted)


@pytest.mark.parametrize("cell", [cell for name, cell in AROUND if name is marked], ids="-".join)
def test_what_is_set_on_a_parameter_reaches_the_optimizer_factory(cell):
    names = [name for name, _ in mlp().named_parameters()]
    for found in values(play(AROUND)[marked, cell]):
        assert found == [*(name for name in names if name.endswith("bias")), len(names)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepspeed_says_nothing_about_a_model_without_units_and_keeps_its_other_warnings(strategy):
    for heard in values(play(AROUND)[listened, (strategy,)]):
        assert heard == ["something else"]
