"""Layers over ranks: each rank has a part of every weight, and training is that of plain torch with all."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from harness import BACKENDS, config, in_ranks, my_rank, of_all_ranks, refused
from harness.training import DEEP, FEWER
from sliced_training import MUON, SAMPLES, STRATEGIES, WINDOW, compared, loss_of, plainly, tokens, trained
from tensor_models import PLAN, build

import unishard
from unishard.parallel.experts import dispatch
from unishard.parallel.tensor import cutter

LAYER = "model.layers.0"
COLUMNS = f"{LAYER}.mlp.down_proj.weight"


def configured(backend: str, strategy: str = "full_shard", size: int = 2, **sections: Any) -> Any:
    training = {"micro_batch_size": SAMPLES, "gradient_accumulation_steps": WINDOW, "gradient_clipping": 0.3}
    return config(backend, strategy, **{"training": training, "parallel": {"tensor": size}} | sections)


@in_ranks(
    cells=(
        *((backend, strategy, "tied") for backend in BACKENDS for strategy in (*STRATEGIES, "shard_optimizer")),
        *((backend, STRATEGIES[at], "qwen3, one key head") for at, backend in enumerate(BACKENDS)),
        *((backend, STRATEGIES[at], "biased") for at, backend in enumerate(BACKENDS[::-1])),
        *((backend, strategy, "mixtral") for backend in BACKENDS for strategy in ("full_shard", "no_shard")),
    )
)
def test_training_is_that_of_plain_torch(backend, strategy, name):
    compared(configured(backend, strategy), build, name)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_an_own_model_trains_by_its_plan(backend):
    """Packed weights, a norm of single heads, and a head that shares the embedding's weight."""
    compared(configured(backend, parallel={"tensor": {"size": 2, "plan": PLAN}}), build, "own")


@in_ranks(
    cells=(
        ("fsdp", "full_shard", "precision=bf16"),
        ("deepspeed", "shard_grad_op", "precision=bf16"),
        ("fsdp", "shard_grad_op", "activation_checkpointing=full"),
        ("deepspeed", "full_shard", "offload.optimizer=cpu"),
        ("deepspeed", "full_shard", "compile={mode: per_block, backend: eager}"),
        ("fsdp", "full_shard", "training.loss_chunk_tokens=5"),
    )
)
def test_beside_other_fields(backend, strategy, field):
    compared(configured(backend, strategy).override(field), build, "llama")


@in_ranks(
    cells=(
        *(("fsdp", strategy, "phi3") for strategy in ("full_shard", "no_shard")),
        *(("deepspeed", strategy, "phi3") for strategy in ("full_shard", "shard_grad_op", "no_shard")),
    )
)
def test_muon_updates_whole_matrices(backend, strategy, name):
    """Of which each rank has rows, columns, or rows of two tensors in one."""
    compared(configured(backend, strategy, optimizer=MUON), build, name)


@in_ranks(
    world=4,
    cells=(
        ("deepspeed", "full_shard", "llama", "tensor=2"),
        ("deepspeed", "shard_grad_op", "one key head", "tensor=4"),
        ("fsdp", "shard_optimizer", "llama", "tensor=2 sequence=2"),
        ("deepspeed", "full_shard", "llama", "tensor=2 sequence=2"),
        ("fsdp", "full_shard", "qwen3moe", "tensor=2 expert=4"),
        ("deepspeed", "shard_grad_op", "qwen3moe", "tensor=2 expert=2"),
        ("fsdp", "hybrid_shard", "tied", "tensor=2"),
        ("deepspeed", "hybrid_shard", "tied", "tensor=2"),
        ("fsdp", "full_shard", "qwen3moe", "tensor=2 expert=4 muon"),
        ("deepspeed", "shard_grad_op", "qwen3moe", "tensor=2 expert=4 muon"),
        ("fsdp", "hybrid_shard", "llama", "tensor=2 muon"),
        *((("fsdp", "full_shard", "llama", "tensor=2"),) * DEEP),
    ),
)
def test_four_ranks(backend, strategy, name, parallel):
    """Ranks with the same part, and other keys: neighbors have layers together, then sequences."""
    sizes = dict(each.split("=") for each in parallel.split() if "=" in each)
    sections = {key: int(size) for key, size in sizes.items()}
    more = {"optimizer": MUON} if "muon" in parallel else {}
    sharding = {"strategy": strategy, **({"group_size": 2} if strategy.startswith("hybrid") else {})}
    compared(configured(backend, sharding=sharding, parallel=sections, **more), build, name)


@in_ranks(cells=FEWER)
def test_a_checkpoint_resumes_with_any_size_on_any_engine(backend, strategy, root):
    """Weights and optimizer state bit for bit; the further updates are those of a run without a stop."""
    other = BACKENDS[backend == BACKENDS[0]]
    with unishard.prepare(build("tied"), configured(backend, strategy)) as engine:
        trained(engine, 1, updates=1)
        engine.weights.average(0.5)
        saved = engine.save(root)
        weights = engine.weights.state_dict(all_ranks=True)
        going_on = trained(engine, 1, first=1, updates=2)
    for resumed, size in ((backend, 1), (other, 2), (other, 1)):
        cfg = configured(resumed, STRATEGIES[strategy == STRATEGIES[0]], size)
        with unishard.prepare(build("tied"), cfg, reseed=False) as engine:
            engine.load(saved, verify="bits")
            own = engine.weights.state_dict(all_ranks=True)
            assert all(torch.equal(own[name], value) for name, value in weights.items())
            if size == 2:
                curve = trained(engine, 1, first=1, updates=2)
                assert curve.losses == pytest.approx(going_on.losses, rel=1e-6)
                assert curve.norms == pytest.approx(going_on.norms, rel=1e-6)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_momentum_of_muon_moves_to_the_other_engine_and_out_of_slices(backend, root):
    other = BACKENDS[backend == BACKENDS[0]]
    with unishard.prepare(build("phi3"), configured(backend, optimizer=MUON)) as engine:
        trained(engine, 1, updates=1)
        saved = engine.save(root)
        going_on = trained(engine, 1, first=1, updates=1)
        weights = engine.weights.state_dict(all_ranks=True)
    for size in (2, 1):
        with unishard.prepare(build("phi3"), configured(other, size=size, optimizer=MUON), reseed=False) as engine:
            engine.load(saved, verify="bits")
            curve = trained(engine, 1, first=1, updates=1)
            own = engine.weights.state_dict(all_ranks=True)
        assert curve.losses == pytest.approx(going_on.losses, rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6, msg=name)


@in_ranks(cells=FEWER)
def test_whole_weights_and_gradients(backend, strategy, root):
    """Whoever reads or writes a weight sees all of it."""
    model, batch = build("llama"), tokens(0)
    loss_of(model(input_ids=batch, labels=batch)).backward()
    plain = dict(model.named_parameters())
    cfg = configured(backend, strategy).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(build("llama"), cfg) as engine:
        streamed = {name: value.clone() for name, value in engine.weights.stream(names="model")}
        engine.backward(loss_of(engine(input_ids=batch, labels=batch)))
        gradient = engine.gradients.read(COLUMNS)
        engine.discard()
        message = refused(lambda: engine.weights.unsharded([COLUMNS]).__enter__())
        engine.weights.write(COLUMNS, plain[COLUMNS].detach() * 2)
        doubled = engine.weights.read(COLUMNS)
        engine.export(root)
        released = engine.framework.release()
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)
    torch.testing.assert_close(gradient, plain[COLUMNS].grad, rtol=0, atol=1e-6)
    assert torch.equal(doubled, plain[COLUMNS] * 2)
    assert "engine.weights.read(name)" in message
    with torch.no_grad():
        model.get_parameter(COLUMNS).mul_(2)
    again = type(model).from_pretrained(root)
    assert torch.equal(released(input_ids=batch).logits, model(input_ids=batch).logits)
    assert torch.equal(again(input_ids=batch).logits, model.eval()(input_ids=batch).logits)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_a_group_generates_and_evaluates_one_sample(backend):
    plain, prompt = build("llama").eval(), tokens(0)[:1]
    expected = plain.generate(prompt, max_new_tokens=4, do_sample=False)
    with unishard.prepare(build("llama"), configured(backend)) as engine:
        engine.module.eval()
        generated = engine.generate(prompt, max_new_tokens=4, do_sample=False)
        logits = engine(input_ids=prompt).logits
        gathered = engine.gather_for_metrics(logits.argmax(-1))
        other = refused(engine, input_ids=tokens(my_rank())[:1])
        engine.module.train()
        batches = engine.batches([{"input_ids": tokens(my_rank())}])
        read = refused(lambda: next(iter(batches)))
    assert torch.equal(generated, expected)
    torch.testing.assert_close(logits, plain(input_ids=prompt).logits, rtol=0, atol=1e-5)
    assert gathered.shape == prompt.shape  # once
    assert "ranks 0 to 1 share each sample (parallel.tensor.size is 2), but have read different ones" in other
    assert "ranks 0 to 1 share each sample" in read


@in_ranks
def test_a_factor_that_is_left_out_is_seen():
    """That of ZeRO-2, which divides by all ranks."""
    left_out = mock.patch.object(cutter.Cutter, "factor", property(lambda _: 1.0, lambda *_: None), create=True)
    with left_out, unishard.prepare(build("llama"), configured("deepspeed", "shard_grad_op")) as engine:
        (norm,) = trained(engine, 1, updates=1).norms
    expected = plainly(build, "llama", 1)[0].norms[0]
    assert abs(norm - expected) > 1e-5 * expected


@in_ranks
def test_a_part_of_a_gradient_that_is_taken_for_the_whole_is_refused():
    """That of a norm of single heads."""
    left_out = mock.patch.object(cutter.Cutter, "part_of_gradient", lambda _, parameter: parameter)
    with left_out, unishard.prepare(build("qwen3"), configured("fsdp")) as engine:
        message = refused(trained, engine, 1)
    assert "q_norm has whole weights, and each rank has a part of their gradients" in message


@in_ranks
def test_what_cannot_be_cut_is_refused_and_left_as_it_is():
    model = build("three heads")
    before = {key: value.shape for key, value in model.named_parameters()}
    assert "parallel.tensor is 2, which does not fit the 3 heads" in refused(
        unishard.prepare, model, configured("fsdp")
    )
    assert before == {key: value.shape for key, value in model.named_parameters()}
    cfg = configured("fsdp", size=3)
    assert "parallel.tensor.size: is 3, which does not divide 2 ranks" in refused(unishard.prepare, model, cfg)


@in_ranks(world=4)
def test_a_group_reads_the_same_samples_and_draws_the_same_random_numbers():
    cfg = configured("fsdp").override("training.gradient_accumulation_steps=1")
    dataset = [{"input_ids": tokens(number)[0], "labels": tokens(number)[0]} for number in range(8)]
    with unishard.prepare(build("llama"), cfg) as engine:
        drawn = of_all_ranks(torch.rand(1).item())
        read = [batch["input_ids"] for batch in engine.batches(unishard.dataloader(dataset, cfg))]
        everyones = of_all_ranks([batch.tolist() for batch in read])
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert everyones[0] == everyones[1] != everyones[2] == everyones[3]
    assert len(read) == 2  # micro-batches of 2 for each of 2 groups


@in_ranks
def test_steps_leave_no_tensors_behind():
    """Copies of inputs for several modules were cycles of references that no collector sees."""
    counts = []
    with unishard.prepare(build("mixtral"), configured("fsdp")) as engine:
        for turn in range(3):
            trained(engine, 1, first=turn, updates=1)
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[2] - counts[1] < 2 * WINDOW  # one for each block would be more


@in_ranks
def test_a_group_decodes_by_hand_with_a_cache_of_own_heads():
    plain, prompt = build("llama").eval(), tokens(0)[:1]
    with unishard.prepare(build("llama"), configured("fsdp")) as engine, torch.no_grad():
        engine.module.eval()
        first = engine(input_ids=prompt[:, :4], use_cache=True)
        second = engine(input_ids=prompt[:, 4:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits, plain(input_ids=prompt).logits[:, 4:], rtol=0, atol=1e-5)


@in_ranks(
    cells=(
        ("tensor", "deepspeed", "shard_grad_op"),
        ("expert", "fsdp", "full_shard"),
        ("expert", "deepspeed", "no_shard"),
    )
)
def test_an_overflow_in_the_part_of_one_rank_is_skipped_by_all(key, backend, strategy):
    place = cutter if key == "tensor" else dispatch
    sections = {"parallel": {key: 2}, "precision": "fp16"}
    training = {"micro_batch_size": SAMPLES, "gradient_clipping": 0.3}
    own, overflows = place.scale_gradient, [False]

    def changed(values, factor):
        return own(values, torch.inf if overflows[0] and my_rank() == 1 else factor)

    cfg = config(backend, strategy, training=training, **sections).override("precision.initial_loss_scale=128")
    with unishard.prepare(build("qwen3moe"), cfg) as engine, mock.patch.object(place, "scale_gradient", changed):
        updated = []
        for number in range(3):
            overflows[0], batch = number == 1, tokens(number)
            engine.backward(loss_of(engine(input_ids=batch, labels=batch)))
            updated.append(engine.step().updated)
        assert of_all_ranks(updated) == [[True, False, True]] * 2
        assert all(value.isfinite().all() for value in engine.weights.state_dict(all_ranks=True).values())
