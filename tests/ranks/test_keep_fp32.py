"""`precision.keep_fp32`: what stays in fp32 in a 16-bit run trains as in plain torch with the same dtypes, on both
engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from harness import BACKENDS, PAIRS, config, my_rank, play, values
from torch import nn

import unishard
from unishard.distributed.nested_tensors import cast

CELLS = PAIRS
everywhere = pytest.mark.parametrize("cell", CELLS, ids="-".join)
PATTERNS = ("norm", "router", "gain")
RATE, CLIP, WINDOW, UPDATES = 0.05, 0.5, 2, 3


class Block(nn.Module):
    """A normalization, a router between two experts, and a weight of its own beside them."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        mixed = sum(weights[:, index : index + 1] * expert(normed) for index, expert in enumerate(self.experts))
        return x + (self.gain * mixed).to(x.dtype)


class Mixture(nn.Module):
    """Two blocks between a root's own layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.final_norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def loss_of(logits: torch.Tensor, rank: int, turn: int) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), torch.arange(3).add(rank + turn) % 4)


def inputs(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(100 * rank + turn))


def sections(compute: str, keep: object = PATTERNS) -> dict[str, object]:
    return {
        "precision": {"compute": compute, "keep_fp32": keep if keep == "auto" else [*keep]}
        | ({"initial_loss_scale": 1.0} if compute == "fp16" else {}),
        "training": {"gradient_accumulation_steps": WINDOW, "gradient_clipping": CLIP},
        "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": 0.1, "no_decay": ["bias"]},
    }


def steps(engine, start: int, stop: int) -> list[tuple[float, float]]:
    done = []
    for turn in range(start * WINDOW, stop * WINDOW):
        loss = loss_of(engine(inputs(my_rank(), turn)), my_rank(), turn)
        engine.backward(loss)
        step = engine.step()
        done.append(engine.mean(loss))
        if step.updated:
            done[-WINDOW:] = [(sum(done[-WINDOW:]) / WINDOW, step.grad_norm)]
    return done


def trained(backend, strategy, compute, patterns=PATTERNS):
    """Losses, norms, and weights after three updates; with the dtypes that the forward saw."""
    seen = {}
    with unishard.prepare(Mixture(), config(backend, strategy, **sections(compute, patterns))) as engine:
        block = engine.module.blocks[0]
        for name, module in (("router", block.router), ("expert", block.experts[0])):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update({name: (module.weight.dtype, out.dtype)})
            )
        curve = steps(engine, 0, UPDATES)
        return curve, {name: engine.weights.read(name) for name, _ in Mixture().named_parameters()}, seen


class InFp32(nn.Module):
    """The oracle's cast around a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.float()).to(x.dtype)


def oracle(
    world: int, compute: torch.dtype, patterns: tuple[str, ...] = PATTERNS
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Plain torch in one process: fp32 weights that are updated, and a copy that computes."""
    masters = Mixture()
    named = dict(masters.named_parameters())
    plain, decayed = ([each for name, each in named.items() if ("bias" in name) is exempt] for exempt in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=RATE
    )
    found = []
    for update in range(UPDATES):
        losses = []
        for turn in range(update * WINDOW, (update + 1) * WINDOW):
            for rank in range(world):
                low = copy.deepcopy(masters)
                low.zero_grad()
                for name, parameter in low.named_parameters():
                    parameter.data = parameter.data.to(
                        torch.float32 if any(each in name for each in patterns) else compute
                    )
                own = dict(low.named_parameters())
                low.final_norm = InFp32(low.final_norm)
                for block in low.blocks:
                    block.norm, block.router = InFp32(block.norm), InFp32(block.router)
                loss = loss_of(low(inputs(rank, turn).to(compute)), rank, turn)
                (loss / (WINDOW * world)).backward()
                losses.append(loss.item())
                for name, parameter in own.items():
                    gradient = parameter.grad.float()
                    named[name].grad = gradient if named[name].grad is None else named[name].grad + gradient
        norm = nn.utils.clip_grad_norm_(masters.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(losses) / len(losses), norm.item()))
    return found, masters.state_dict()


def flat(curve: list[tuple[float, float]]) -> Iterator[float]:
    return (number for pair in curve for number in pair)


PLAYED = tuple((trained, (*cell, "bf16")) for cell in CELLS)


@everywhere
def test_kept_modules_train_as_in_plain_torch(cell):
    curve, weights = oracle(2, torch.bfloat16)
    for found, state, seen in values(play(PLAYED)[trained, (*cell, "bf16")]):
        assert seen == {"router": (torch.float32, torch.bfloat16), "expert": (torch.bfloat16, torch.bfloat16)}
        assert [*flat(found)] == pytest.approx([*flat(curve)], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-5)


HALF = (("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard"), ("fsdp", "full_shard"), ("fsdp", "no_shard"))


def test_fp16_and_one_rank():
    curve, weights = oracle(1, torch.float16)
    played = play(tuple((trained, (*cell, "fp16")) for cell in HALF), world=1)
    for cell in HALF:
        ((found, state, _),) = values(played[trained, (*cell, "fp16")])
        assert [*flat(found)] == pytest.approx([*flat(curve)], rel=1e-5)
        assert all(torch.allclose(state[name], weight, rtol=1e-5, atol=1e-5) for name, weight in weights.items())


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(first, second, directory):
    """Two updates on one engine, and the third on another; with what was noted."""
    where = {"checkpoint": {"dir": directory}}
    with unishard.prepare(Mixture(), config(*first, **sections("bf16"), **where)) as engine:
        curve = steps(engine, 0, 2)
        engine.save()
    with unishard.prepare(Mixture(), config(*second, **sections("bf16"), **where)) as engine:
        notes = engine.load("latest").notes
        return curve + steps(engine, 2, 3), notes


MOVES = (
    (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op")),
    (("deepspeed", "full_shard"), ("fsdp", "shard_optimizer")),
    (("deepspeed", "shard_optimizer"), ("deepspeed", "full_shard")),
    (("deepspeed", "shard_grad_op"), ("fsdp", "full_shard")),
)


def test_a_run_goes_on_on_the_other_engine(tmp_path_factory):
    curve, _ = oracle(2, torch.bfloat16)
    scenarios = tuple((resumed, (*move, str(tmp_path_factory.mktemp("moved")))) for move in MOVES)
    for outcomes in play(scenarios).values():
        for found, notes in values(outcomes):
            assert [*flat(found)] == pytest.approx([*flat(curve)], rel=1e-5)
            assert not list(notes)


# -- inference -------------------------------------------------------------------------------------


def evaluated(backend, strategy):
    with unishard.prepare(
        Mixture(), config(backend, strategy, **sections("bf16") | {"optimizer": None}), train=False
    ) as engine:
        return engine(inputs(0, 0))


EVALUATED = tuple(
    (evaluated, cell) for cell in (*((backend, "full_shard") for backend in BACKENDS), ("fsdp", "no_shard"))
)


def test_inference_keeps_the_same():
    low = Mixture()
    for name, parameter in low.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if any(each in name for each in PATTERNS) else torch.bfloat16)
    low.final_norm = InFp32(low.final_norm)
    for block in low.blocks:
        block.norm, block.router = InFp32(block.norm), InFp32(block.router)
    with torch.no_grad():
        plain = low(inputs(0, 0).bfloat16())
    for outcomes in play(EVALUATED).values():
        for found in values(outcomes):
            assert torch.equal(found, plain)


# -- what a model's class names --------------------------------------------------------------------


def t5():
    """Small enough that nothing has more than two gradients: in bf16 the order of a third would show."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "num_heads": 2,
        "vocab_size": 40,
        "dropout_rate": 0.0,
    }
    how = {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    return T5ForConditionalGeneration(T5Config(**shape, **how))


def tokens(rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.randint(2, 40, (2, 7), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": drawn, "labels": drawn[:, :5].clone()}


def t5_trained(backend, strategy, compute, keep):
    """Two updates of a T5: losses, norms, and the dtype of `wo`."""
    patterns = "auto" if keep == "auto" else [keep]
    scale = {"initial_loss_scale": 1.0} if compute == "fp16" else {}
    cfg = config(
        backend,
        strategy,
        precision={"compute": compute, "keep_fp32": patterns, **scale},
        optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.0},
    )
    with unishard.prepare(t5(), cfg) as engine:
        found = []
        wo = engine.module.decoder.block[0].layer[-1].DenseReluDense.wo
        wo.register_forward_hook(lambda module, args, out: found.append((module.weight.dtype, out.dtype)))
        curve = []
        for _ in range(2):
            loss = engine(**tokens(my_rank())).loss
            engine.backward(loss)
            curve.append((engine.mean(loss), engine.step().grad_norm))
        return curve, found[0]


def plain_t5(compute: torch.dtype, kept: str) -> list[tuple[float, float]]:
    """The same as transformers computes it: `from_pretrained` leaves these weights in fp32, and the model casts around
    them.

    Only at the inputs of a block is everything cast, as `precision.cast_inputs` says.
    """

    def low_inputs(module, args, kwargs):
        return cast(args, compute), cast(kwargs, compute)

    masters = t5()
    named = dict(masters.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.0)
    found = []
    for _ in range(2):
        losses = []
        for rank in range(2):
            low = copy.deepcopy(masters)
            low.zero_grad()
            for name, parameter in low.named_parameters():
                parameter.data = parameter.data.to(torch.float32 if kept and kept in name else compute)
            for block in (*low.encoder.block, *low.decoder.block):
                block.register_forward_pre_hook(low_inputs, with_kwargs=True)
            loss = low(**tokens(rank)).loss
            loss.backward()
            losses.append(loss.item())
            for name, parameter in low.named_parameters():
                gradient = parameter.grad.float() / 2
                named[name].grad = gradient if named[name].grad is None else named[name].grad + gradient
        norm = nn.utils.clip_grad_norm_(masters.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(losses) / 2, norm.item()))
    return found


T5 = tuple(
    (t5_trained, (*cell, *how))
    for cell in (
        ("fsdp", "full_shard"),
        ("fsdp", "no_shard"),
        ("deepspeed", "full_shard"),
        ("deepspeed", "shard_grad_op"),
    )
    for how in (("fp16", "auto"), ("bf16", r"\.wo\."), ("bf16", "auto"))
)


@pytest.mark.parametrize("asked", [asked for _, asked in T5], ids="-".join)
def test_a_t5_keeps_what_its_class_says(asked):
    *_, compute, keep = asked
    dtype = torch.float16 if compute == "fp16" else torch.bfloat16
    kept = torch.float32 if (compute, keep) != ("bf16", "auto") else dtype  # that list of its class is only for fp16
    plain = plain_t5(dtype, "" if kept is dtype else ".wo.")
    for curve, seen in values(play(T5)[t5_trained, asked]):
        assert seen == (kept, kept)
        assert [*flat(curve)] == pytest.approx([*flat(plain)], rel=1e-5)
