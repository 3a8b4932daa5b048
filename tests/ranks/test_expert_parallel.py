"""Experts over ranks: each rank has some of them, and training is that of plain torch with all."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from expert_models import Own, build
from harness import BACKENDS, config, in_ranks, my_rank, of_all_ranks, refused
from harness.training import DEEP, FEWER
from sliced_training import MUON, SAMPLES, STRATEGIES, WINDOW, compared, loss_of, plainly, tokens, trained

import unishard
from dev.ranks.recording import Recorder
from unishard.parallel.experts import dispatch
from unishard.testing.features.quantization import quantized_by_bitsandbytes, with_adapters

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def configured(backend: str, strategy: str = "full_shard", size: int = 2, **sections: Any) -> Any:
    training = {"micro_batch_size": SAMPLES, "gradient_accumulation_steps": WINDOW, "gradient_clipping": 0.3}
    return config(backend, strategy, **{"training": training, "parallel": {"expert": size}} | sections)


@in_ranks(
    cells=tuple(
        (backend, strategy, name)
        for backend in BACKENDS
        for strategy in (*STRATEGIES, "shard_optimizer", "no_shard")
        for name in ("balanced", "own")
    )
)
def test_training_is_that_of_plain_torch(backend, strategy, name):
    """The second rank has experts that get no token, in the own model."""
    compared(configured(backend, strategy), build, name)


@in_ranks(
    cells=(
        ("fsdp", "full_shard", "precision=bf16"),
        ("deepspeed", "shard_grad_op", "precision=bf16"),
        ("fsdp", "no_shard", "precision=bf16"),
        ("deepspeed", "no_shard", "precision=bf16"),
        ("fsdp", "shard_grad_op", "activation_checkpointing=full"),
        ("deepspeed", "full_shard", "activation_checkpointing=selective"),
        ("fsdp", "full_shard", "offload.optimizer=cpu"),
        ("deepspeed", "shard_grad_op", "offload.optimizer=cpu"),
        ("deepspeed", "full_shard", "compile={mode: per_block, backend: eager}"),
        ("fsdp", "full_shard", "training.loss_chunk_tokens=5"),
        ("fsdp", "full_shard", "sharding.units=[MixtralExperts]"),
    )
)
def test_beside_other_fields(backend, strategy, field):
    compared(configured(backend, strategy).override(field), build, "mixtral")


@in_ranks(cells=(("fsdp", "eager", "fp32"), ("deepspeed", "batched_mm", "bf16"), ("fsdp", "grouped_mm", "bf16")))
def test_every_way_to_compute_experts(backend, name, precision):
    compared(configured(backend, precision=precision), build, name)


@in_ranks(cells=(("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard")))
def test_muon_updates_whole_matrices(backend, strategy):
    compared(configured(backend, strategy, optimizer=MUON), build, "mixtral")


FOUR_RANKS = (
    ("fsdp", "full_shard", 2, 1),
    *(("deepspeed", strategy, 2, 1) for strategy in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")),
    ("fsdp", "hybrid_shard_grad_op", 2, 1),
)
"""The others, of which each part is in one of the cells below."""


@in_ranks(
    world=4,
    cells=(
        ("deepspeed", "full_shard", 4, 1),
        ("fsdp", "full_shard", 2, 2),
        ("deepspeed", "shard_grad_op", 4, 2),
        ("fsdp", "no_shard", 2, 1),
        ("fsdp", "hybrid_shard", 2, 1),
        ("deepspeed", "hybrid_shard_grad_op", 2, 1),
        *(FOUR_RANKS * DEEP),
    ),
)
def test_four_ranks(backend, strategy, size, sharing):
    """Ranks with the same experts, copies of these, and samples that ranks share."""
    sharding = {"strategy": strategy, **({"group_size": 2} if strategy.startswith("hybrid") else {})}
    cfg = configured(backend, size=size, sharding=sharding).override(f"parallel.sequence={sharing}")
    compared(cfg, build, "mixtral")


@in_ranks(cells=FEWER)
def test_a_checkpoint_resumes_with_any_size_on_any_engine(backend, strategy, root):
    """Weights and optimizer state bit for bit; the further updates are those of a run without a stop, with the learning
    rate that the script has set."""
    other = BACKENDS[backend == BACKENDS[0]]
    with unishard.prepare(build("mixtral"), configured(backend, strategy)) as engine:
        trained(engine, 2, updates=1)
        for group in engine.optimizer.param_groups:
            group["lr"] *= 3
        saved = engine.save(root)
        weights = engine.weights.state_dict(all_ranks=True)
        going_on = trained(engine, 2, first=1, updates=2)
    for resumed, size in ((backend, 1), (other, 2), (other, 1)):
        cfg = configured(resumed, STRATEGIES[strategy == STRATEGIES[0]], size)
        with unishard.prepare(build("mixtral"), cfg, reseed=False) as engine:
            engine.load(saved, verify="bits")
            own = engine.weights.state_dict(all_ranks=True)
            curve = trained(engine, 2, first=1, updates=2)
        assert all(torch.equal(own[name], value) for name, value in weights.items())
        assert curve.losses == pytest.approx(going_on.losses, rel=1e-6)
        assert curve.norms == pytest.approx(going_on.norms, rel=1e-6)


@in_ranks(cells=FEWER)
def test_whole_weights_and_gradients(backend, strategy):
    """Whoever reads or writes a weight sees all experts."""
    model, batch = build("mixtral"), tokens(0)
    loss_of(model(input_ids=batch, labels=batch)).backward()
    plain = dict(model.named_parameters())
    cfg = configured(backend, strategy).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(build("mixtral"), cfg) as engine:
        streamed = {name: value.clone() for name, value in engine.weights.stream(names="model")}
        saved = dict(engine.weights.stream())
        engine.backward(loss_of(engine(input_ids=batch, labels=batch)))
        gradient = engine.gradients.read(EXPERTS)
        engine.discard()
        message = refused(lambda: engine.weights.unsharded([EXPERTS]).__enter__())
        engine.weights.write(EXPERTS, plain[EXPERTS].detach() * 2)
        doubled = engine.weights.read(EXPERTS)
        released = engine.framework.release()
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in saved  # as `save_pretrained` names them
    torch.testing.assert_close(gradient, plain[EXPERTS].grad, rtol=0, atol=1e-7)
    assert torch.equal(doubled, plain[EXPERTS] * 2)
    assert "engine.weights.read(name)" in message
    with torch.no_grad():
        model.get_parameter(EXPERTS).mul_(2)
    assert torch.equal(released(input_ids=batch).logits, model(input_ids=batch).logits)


@in_ranks(cells=FEWER)
def test_ranks_generate_and_evaluate_as_far_as_they_need(backend, strategy):
    """Ranks that have finished go on for the others."""
    plain, prompt, more = build("mixtral").eval(), tokens(my_rank())[:1, : 3 + my_rank()], 2 + 2 * my_rank()
    expected = plain.generate(prompt, max_new_tokens=more, do_sample=False)
    losses = [loss_of(plain(input_ids=each, labels=each)).item() for each in map(tokens, range(1 + my_rank()))]
    with unishard.prepare(build("mixtral"), configured(backend, strategy)) as engine:
        engine.module.eval()
        generated = engine.generate(prompt, max_new_tokens=more, do_sample=False)
        with engine.lockstep():
            own = [loss_of(engine(input_ids=each, labels=each)).item() for each in map(tokens, range(1 + my_rank()))]
    assert torch.equal(generated, expected)
    assert own == pytest.approx(losses, rel=1e-6)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_adapters_train_on_a_quantized_base_beside_divided_experts(backend):
    """QLoRA of attention, whose experts are frozen."""

    def adapted() -> Any:
        model = quantized_by_bitsandbytes(build("mixtral").requires_grad_(False), "nf4")
        return with_adapters(model)

    plain, batch = adapted().train(), tokens(0)
    loss_of(plain(input_ids=batch, labels=batch)).backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None])
    cfg = configured(backend).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(adapted(), cfg) as engine:
        engine.backward(loss_of(engine(input_ids=batch, labels=batch)))
        assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-6)


@in_ranks(cells=((1, 0, 0), (2, 6, 4)))
def test_tokens_and_their_gradients_travel_there_and_back(size, forward, backward):
    """In each of 2 layers: how many, the tokens, and the results; in backward the gradients of both."""
    recorder, batch = Recorder(), tokens(my_rank())
    cfg = configured("fsdp", size=size).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(build("mixtral"), cfg) as engine, recorder:
        recorder.phase = "forward"
        loss = loss_of(engine(input_ids=batch, labels=batch))
        recorder.phase = "backward"
        engine.backward(loss)
        recorder.phase = "step"
        engine.step()
    found = Counter(each.phase for each in recorder.events if each.kind == "c10d::alltoall_base_")
    assert found == Counter(forward=forward, backward=backward)


@in_ranks
def test_a_factor_that_is_left_out_is_seen():
    """That of FSDP2's means over the ranks with the same experts."""
    with (
        mock.patch.object(dispatch, "scale_gradient", lambda values, factor: values),
        unishard.prepare(build("balanced"), configured("fsdp")) as engine,
    ):
        (norm,) = trained(engine, 2, updates=1).norms
    expected = plainly(build, "balanced", 2)[0].norms[0]
    assert abs(norm - expected) > 1e-4 * expected


@in_ranks(
    cells=(
        ("dense", "parallel.expert=2", "LlamaForCausalLM has none that it knows"),
        ("mixtral", "parallel.expert=4", "which does not divide 2 ranks; write 2"),
        ("mixtral", "sharding.replicate=[experts]", "of which `parallel` gives each rank a part; leave it out"),
        ("weighs inputs", "parallel.expert=2", "experts (Experts): its forward must"),
    )
)
def test_what_cannot_be_divided_is_refused_by_name(name, field, expected):
    model = Own(weighs_inputs=True) if name == "weighs inputs" else build(name)
    before = {key: value.shape for key, value in model.named_parameters()}
    cfg = configured("fsdp").override(field)

    def run() -> None:
        with unishard.prepare(model, cfg) as engine:
            trained(engine, 2)

    assert expected in refused(run)
    assert name == "weighs inputs" or before == {key: value.shape for key, value in model.named_parameters()}


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_an_optimizer_of_whole_tensors_is_refused(backend):
    cfg = unishard.load({"backend": backend, "sharding": "full_shard", "parallel": {"expert": 2}})
    message = refused(unishard.prepare, build("mixtral"), cfg, lambda some: torch.optim.Adafactor(some, lr=1e-2))
    assert "parallel: is not supported with Adafactor, which needs whole tensors" in message


@in_ranks
def test_experts_that_drop_results_at_random_are_divided():
    """What a module of experts does is proved without dropout."""
    with unishard.prepare(Own(dropout=0.5), configured("fsdp")) as engine:
        assert all(norm > 0 for norm in trained(engine, 2).norms)


@in_ranks(cells=(("expert",), ("sequence",)))
def test_engines_share_groups_of_ranks(key):
    """A group has threads of its own, and is never destroyed."""
    threads = []
    for _ in range(3):
        unishard.prepare(build("mixtral"), configured("fsdp", parallel={key: 2})).close()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[1] == threads[2]
    assert of_all_ranks(len(threads)) == [3, 3]
