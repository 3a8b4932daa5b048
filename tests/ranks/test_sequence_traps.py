"""What others got wrong with long sequences, as a user notices it, where no other test of `parallel.sequence` has it."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from harness import BACKENDS, in_ranks, of_all_ranks, refused
from harness.training import DEEP, EACH
from sequence_models import LENGTH, VOCABULARY, Own, Packed, batch_of, build
from test_sequence import assert_equal, configured, expected, trained
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import unishard
from unishard.sequence import tiles

METHODS = ("ulysses", "allgather")


@in_ranks(cells=EACH, in_turn=True)
def test_each_rank_shows_the_loss_of_the_whole_micro_batch(backend):
    """Not that of its part, in training too, where the parts have different numbers of labels, one of them none."""
    cfg = configured(backend, training={"micro_batch_size": 2})
    batch = batch_of(Packed(packed=False), 0)
    batch["labels"][:, : LENGTH // 2 + 2] = -100
    with unishard.prepare(build("llama"), cfg) as engine:
        (part,) = engine.batches([batch])
        loss = engine(**part).loss
        engine.backward(loss)
        norm = engine.step().grad_norm
    plain = build("llama")
    whole = plain(**batch).loss
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()]).item())
    assert of_all_ranks(loss.item()) == [loss.item()] * 2


@in_ranks(cells=tuple((backend, METHODS[number % 2]) for number, backend in enumerate(BACKENDS)))
def test_adapters_on_the_head_and_a_whole_trained_module(backend, method):
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        config = LoraConfig(
            r=4, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"], init_lora_weights=False
        )
        return get_peft_model(build("llama"), config)

    cfg = configured(backend, method=method)
    with unishard.prepare(adapted(), cfg) as engine:
        curve = trained(engine, cfg, "llama")
    reference, _ = expected(cfg, "llama", 1, model=adapted())
    assert_equal(curve, reference)


class Scored(nn.Module):
    """A causal language model whose own loss is the mean over what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Own()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, shift_labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        logits = self.body(input_ids, position_ids)
        if shift_labels is None:
            return (logits,)
        return functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), logits


def _loaded(implementation: str) -> Any:
    """A model as `from_pretrained` returns it with `attn_implementation`, whose kernels need not be here."""
    model: Any = build("llama")
    model.config._attn_implementation_internal = implementation
    return model


def _doubled(module, query, key, value, mask, scaling=None, **options):
    """Attention that no one else has."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=2 * scaling), None


@in_ranks(
    cells=tuple(
        (BACKENDS[number % 2], name)
        for number, name in enumerate(("eager", "flex_attention", "flash_attention_2", "flash_attention_3"))
    )
)
def test_attention_of_another_name_is_replaced_and_logged_once(backend, name):
    cfg, lines = configured(backend), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("unishard")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    reference, _ = expected(cfg, "llama", 1)
    installed = mock.patch.object(
        transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda model, name, **options: name
    )
    try:
        with installed, unishard.prepare(model := _loaded(name), cfg) as engine:
            curve = trained(engine, cfg, "llama")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert_equal(curve, reference)
    assert model.config._attn_implementation == name
    said = [line for line in lines if "attn_implementation" in line]
    text = f"parallel.sequence: unishard computes the attention of LlamaForCausalLM, in place of {name}"
    assert said == [f"{text} (attn_implementation)"] * (not dist.get_rank())


@in_ranks(cells=EACH)
def test_attention_by_a_function_of_the_scripts_own_is_refused(backend):
    transformers.AttentionInterface.register("doubled", _doubled)
    transformers.AttentionMaskInterface.register("doubled", transformers.masking_utils.sdpa_mask)
    model = build("llama")
    model.set_attn_implementation("doubled")
    message = refused(unishard.prepare, model, configured(backend))
    assert "attn_implementation of LlamaForCausalLM is doubled, a function of test_sequence_traps" in message
    assert "call model.set_attn_implementation('sdpa') before prepare if that is the same" in message
    assert model.config._attn_implementation == "doubled"


@in_ranks(cells=EACH, in_turn=True)
def test_a_mask_that_a_model_makes_of_its_part_is_refused(backend):
    """As by an indexer that chooses keys."""
    made = f"{transformers.LlamaModel.__module__}.create_causal_mask"
    own = torch.ones(2, 1, (LENGTH + 1) // 2, (LENGTH + 1) // 2, dtype=torch.bool).tril()
    with mock.patch(made, return_value=own), unishard.prepare(build("llama"), configured(backend)) as engine:
        (part,) = engine.batches([batch_of(Packed(), 0)])
        message = refused(engine, **part)
    assert "LlamaAttention has a mask of its own, which parallel.sequence does not support" in message


@in_ranks(cells=EACH)
def test_dropout_and_weights_of_eager_attention(backend):
    """Dropout drops as it does there; weights, which no rank has, are refused."""
    cfg = configured(backend, training={"micro_batch_size": 2})
    model: Any = _loaded("eager")
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.5
    losses = []
    with unishard.prepare(model, cfg) as engine:
        (part,) = engine.batches([batch_of(Packed(packed=False), 0)])
        for _ in range(2):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step(clip_grad_norm=1e-12)
            losses.append(loss.item())
        engine.eval()
        still = [engine(**part).loss.item() for _ in range(2)]
        message = refused(lambda: engine(**part, output_attentions=True).attentions)
    assert abs(losses[0] - losses[1]) > 1e-4
    assert still[0] == pytest.approx(still[1], rel=1e-7)
    assert "is asked for attention weights (output_attentions)" in message


@in_ranks(cells=EACH, in_turn=True)
def test_a_layer_that_chooses_positions_by_its_mask_is_refused(backend):
    """As DeepSeek's sparse attention."""
    model: Any = build("llama")
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: kwargs["attention_mask"][:, 0] and None, with_kwargs=True
    )
    with unishard.prepare(model, configured(backend)) as engine:
        (part,) = engine.batches([batch_of(Packed(), 0)])
        assert "computes with parts of its mask, as attention does whose indexer chooses" in refused(engine, **part)


@in_ranks(cells=EACH, in_turn=True)
def test_a_mean_over_a_part_is_refused_where_all_tokens_have_the_same_loss(backend):
    """At the start of a training the mean over each part is nearly that of the whole."""
    torch.manual_seed(0)
    model, cfg = Scored(), configured(backend)
    nn.init.zeros_(model.body.head.weight)
    nn.init.zeros_(model.body.head.bias)
    batch = batch_of(Packed(), 0)
    with unishard.prepare(model, cfg) as engine:
        (part,) = engine.batches([batch])
        message = refused(
            lambda: engine(part["input_ids"], position_ids=part["position_ids"], shift_labels=part["shift_labels"])
        )
    assert "computes a loss that is no mean over tokens" in message


class Fails(nn.Module):
    """Has a table that is as long as whole samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = Own(), nn.Parameter(torch.zeros(LENGTH + 1, VOCABULARY))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids, position_ids) + self.table


@in_ranks(cells=EACH, in_turn=True)
def test_a_model_that_fails_with_a_part_is_no_traceback(backend):
    cfg = configured(backend)
    with unishard.prepare(Fails(), cfg) as engine:
        (part,) = engine.batches([batch_of(Packed(), 0)])
        message = refused(engine, part["input_ids"], part["position_ids"])
    assert message.startswith(
        "ModelError: the model fails where each rank has a part of its sequences: RuntimeError: The size"
    )
    assert "parallel.sequence.keys" in message


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


def _largest(engine: Any, length: int, documents: int) -> int:
    each = length // documents
    tokens = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(each).repeat(documents)[None]
    (part,) = engine.batches([{"input_ids": tokens, "labels": tokens, "position_ids": positions}])
    with Largest() as largest:
        engine.backward(engine(**part).loss)
        engine.step()
    return largest.elements


@in_ranks(
    cells=tuple(
        (BACKENDS[number % 2], method, name)
        for number, (method, name) in enumerate((method, name) for name in ("windows", "softcap") for method in METHODS)
        if DEEP or number in (0, 3)
    )
)
def test_no_tensor_grows_with_the_square_of_the_sequence(backend, method, name):
    """Neither where documents are packed, nor in one document, also where no kernel is fused (`softcap`)."""
    cfg = configured(backend, method=method, training={"micro_batch_size": 1})
    with pytest.MonkeyPatch.context() as patch, unishard.prepare(build(name), cfg) as engine:
        patch.setattr(tiles, "_BLOCK", 128)
        _largest(engine, 256, 1)  # the proof, once
        packed = [_largest(engine, length, length // 64) for length in (512, 1024)]
        for _ in range(2):  # the last of its looks for a while
            _largest(engine, 256, 1)
        one = [_largest(engine, length, 1) for length in (512, 1024)]
    assert packed[1] <= 2 * packed[0]
    assert packed[1] < 1024 * 1024 / 4
    assert one[1] <= 2 * one[0]


def _pairs(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of tokens but the last, and but the first: a length that does not divide."""
    tokens = batch_of(Packed(length=LENGTH + 1, packed=False), first)["input_ids"]
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@in_ranks(
    cells=tuple((b, method, name) for b in BACKENDS for method in METHODS for name in ("bidirectional", "random"))
)
def test_padding_of_pairs_of_tensors_trains_nothing(backend, method, name):
    """Nor do tokens see it that look to both sides; nor is a model refused that draws random numbers."""
    plain, cfg = build(name), configured(backend, "full_shard", method=method)
    norms, expected_norms = [], []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with unishard.prepare(build(name), cfg.override("training.gradient_accumulation_steps=1")) as engine:
        for first, (tokens, targets) in enumerate(engine.batches([_pairs(2 * turn) for turn in range(2)])):
            items = int((targets != -100).sum())  # on the first rank, which has no padding, all positions
            engine.backward(_loss(engine(tokens), targets), num_items=items)
            norms.append(engine.step().grad_norm)
            whole, labels = _pairs(2 * first)
            (_loss(plain(whole), labels) / labels.numel()).backward()
            expected_norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx(expected_norms, rel=1e-5)


@in_ranks(cells=EACH)
def test_items_that_count_padding_are_refused(backend):
    with unishard.prepare(build("bidirectional"), configured(backend)) as engine:
        ((tokens, targets),) = engine.batches([_pairs(0)])
        loss = _loss(engine(tokens), targets)
        message = refused(lambda: engine.backward(loss, num_items=targets.numel()))
    assert "of which some are padding of parallel.sequence (of 23 to 24 positions)" in message


@in_ranks(cells=EACH)
def test_a_proof_changes_no_weight_and_draws_no_random_number(backend):
    """Also where weights have another precision beside them, and where it refuses."""
    for name, precision in (("own", "bf16"), ("normalized", "fp32")):
        cfg = configured(backend, "shard_grad_op", precision=precision)
        with unishard.prepare(build(name), cfg) as engine:
            batch = next(iter(engine.batches([batch_of(Packed(packed=False), 0)])))
            names = [each for each, _ in engine.module.named_parameters()]
            before, state = [engine.weights.read(each) for each in names], torch.get_rng_state()
            buffers = [each.clone() for each in engine.module.buffers()]
            refused(engine, batch["input_ids"], batch["position_ids"])
            engine.discard()
            assert torch.equal(torch.get_rng_state(), state)
            for each, value in zip(names, before, strict=True):
                assert torch.equal(engine.weights.read(each), value), each
            for buffer, value in zip(engine.module.buffers(), buffers, strict=True):
                assert torch.equal(buffer, value)


class OtherOrder(nn.Module):
    """Runs its units in another order than they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.projection = nn.Linear(32, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for norm in self.norms:
            hidden = norm(hidden)
        return self.head(self.projection(hidden))


@in_ranks(cells=EACH)
def test_the_weights_of_a_proof_are_gone(backend):
    """Also where a unit was gathered ahead and did not run."""
    torch.manual_seed(0)
    plain, batch = OtherOrder(), batch_of(Packed(packed=False, length=24), 0)
    with unishard.prepare(copy.deepcopy(plain), configured(backend, "full_shard")) as engine:
        (part,) = engine.batches([batch])
        logits = engine.gather_for_metrics(engine(part["input_ids"], part["position_ids"]))
        engine.discard()
    torch.testing.assert_close(logits, plain(batch["input_ids"], None), rtol=0, atol=1e-5)


@in_ranks(cells=EACH)
def test_a_loss_that_a_module_keeps_of_its_part_is_refused_where_it_trains(backend):
    cfg = configured(backend).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(build("balanced"), cfg) as engine:
        ((tokens, targets),) = engine.batches([_pairs(0)])
        loss, items = _loss(engine(tokens), targets), (targets != -100).sum()
        balance = engine.module.body.blocks[1].mixer.balance
        message = refused(lambda: engine.backward(loss + items * balance, num_items=items))
        engine.backward(loss, num_items=items)
        updated = engine.step().updated
    assert "body.blocks.1.mixer.balance is computed of a part of the samples" in message
    assert updated
