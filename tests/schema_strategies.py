"""Valid configs of every shape, as documents a person could write."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_grad_op")
BY_UNITS = ("full_shard", "hybrid_shard")
"""Those that gather parameters unit by unit."""
positive = st.integers(1, 2**40)
rate = st.floats(0, 1e6)
fraction = st.floats(0, 1, exclude_max=True)
names = st.lists(st.sampled_from(("Block", "LlamaDecoderLayer", "T5Block", "no", "1e5")), min_size=1, max_size=3)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """What a config file may hold; every combination that the schema allows can come out."""
    strategy = draw(st.sampled_from(STRATEGIES))
    sharding: dict[str, Any] = {"strategy": strategy}
    if strategy != "no_shard":
        sharding |= draw(some(units=st.just("auto") | names, min_unit_params=st.integers(0, 2**40)))
    if strategy in BY_UNITS:
        sharding |= draw(some(reshard_after_forward=st.booleans()))
    sharding |= draw(some(conditional_modules=st.lists(st.sampled_from(("Expert", "VisionTower")), max_size=2)))
    places = ("none", "cpu", "nvme")
    precision = draw(_precisions())
    offload = {
        "params": draw(st.sampled_from(places if strategy in BY_UNITS else ("none",))),
        "optimizer": draw(st.sampled_from(places if strategy != "no_shard" else ("none",))),
    }
    sizes = {
        "reduce_bucket_size": positive,
        "overlap": st.booleans(),
        "desync_check": st.booleans(),
        "timeout": st.none() | st.floats(1, 86400),
        "desync_timeout": st.floats(0.1, 1800),
    }
    if strategy in BY_UNITS:
        sizes["prefetch_bucket_size"] = st.none() | st.integers(0, 2**40)
    if "nvme" in offload.values():
        offload["nvme_path"] = draw(st.sampled_from(("/local", "files of mine")))
    if {"cpu", "nvme"} & {*offload.values()}:
        offload |= draw(some(pin_memory=st.booleans()))
    compiled = draw(st.sampled_from(("none", "per_block", {"mode": "full", "backend": "eager"})))
    return {
        "backend": draw(st.sampled_from(("fsdp", "deepspeed"))),
        "sharding": draw(st.sampled_from((strategy, strategy.upper()))) if len(sharding) == 1 else sharding,
        "precision": precision,
        "offload": offload,
        "optimizer": draw(_optimizers()),
        "scheduler": draw(_schedulers()),
        "activation_checkpointing": draw(st.sampled_from(("none", "full", "selective", "FULL")) | names),
        "compile": compiled,
        **draw(
            some(
                training=some(
                    micro_batch_size=positive,
                    gradient_accumulation_steps=positive,
                    gradient_clipping=st.none() | st.floats(1e-9, 1e9),
                    nonfinite=st.sampled_from(
                        ("skip", "raise") if precision["compute"] == "fp16" else ("skip", "raise", "ignore")
                    ),
                    loss_chunk_tokens=st.none() if isinstance(compiled, dict) else st.none() | positive,
                    last_window=st.sampled_from(("step", "drop")),
                    seed=st.integers(0, 2**32 - 1),
                ).flatmap(_ramped),
                communication=some(**sizes),
                checkpoint=_checkpoints(),
                logging=_logs(),
                profile=st.just({"steps": [2, 3], "dir": "traces"}) | st.just({}),
                strict=st.booleans(),
            )
        ),
    }


def _ramped(training: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A `training` section, with or without a batch that grows."""
    steps = training.get("gradient_accumulation_steps", 1)
    ramp = [[0, steps]] if steps == 1 else [[0, 1], [5, steps]]
    return st.sampled_from((training, training | {"batch_ramp": ramp}))


@st.composite
def _checkpoints(draw: st.DrawFn) -> Any:
    """A `checkpoint` section, or its short form; without a directory nothing can be saved by itself."""
    fields = draw(some(keep_last=positive, async_save=st.booleans()))
    if "keep_last" in fields:
        fields |= draw(some(keep_every=positive, keep_best=positive, best=st.sampled_from(("min", "max"))))
    directory = draw(st.sampled_from((None, "runs/a", "/scratch/of mine")))
    if directory is None:
        return fields
    signals = st.lists(st.sampled_from(("SIGTERM", "SIGUSR1", "usr2", "sigint", "HUP")), max_size=2)
    existing = st.sampled_from(("error", "resume", "new"))
    fields |= draw(
        some(every_steps=positive, every_minutes=st.floats(0.01, 525_600), on_signal=signals, on_existing=existing)
    )
    return {"dir": directory, **fields} if fields else directory


@st.composite
def _logs(draw: st.DrawFn) -> Any:
    """A `logging` section, or its short form."""
    to = draw(st.lists(st.sampled_from(("progress", "jsonl", "wandb")), unique=True, max_size=2))
    if to and {*to} <= {"progress"}:
        return draw(st.sampled_from((to, {"to": to, "every_steps": 3})))
    fields = {"to": to, "dir": "runs/logs"} if to else {}
    if "jsonl" in to:
        fields |= draw(some(module_steps=st.just([1, 100])))
    return fields | (
        draw(some(wandb_mode=st.sampled_from(("online", "offline")), project=st.just("llama"))) if "wandb" in to else {}
    )


patterns = st.lists(st.sampled_from(("bias", "norm", r"^head\.", "[0-3]", "a|b")), min_size=1, max_size=2)
positive_rate = st.floats(1e-9, 1e6)
_betas = st.lists(fraction, min_size=2, max_size=2)
_OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "adamw": {"betas": _betas, "eps": rate, "amsgrad": st.booleans()},
    "adam": {"betas": _betas, "eps": rate, "amsgrad": st.booleans()},
    "sgd": {"momentum": rate},
    "adagrad": {"eps": rate},
    "lion": {"betas": _betas},
}


def _groups(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    one = st.one_of(*(st.fixed_dictionaries({"params": patterns, name: field}) for name, field in fields.items()))
    return st.lists(one, max_size=2)


@st.composite
def _optimizers(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(tuple(_OWN)))
    optimizer = {"name": name} | draw(
        some(lr=positive_rate, groups=_groups(lr=positive_rate, weight_decay=rate), **_OWN[name])
    )
    if optimizer.get("momentum"):
        optimizer |= draw(some(nesterov=st.booleans()))
    if draw(st.booleans()):
        optimizer |= {"weight_decay": draw(positive_rate)} | draw(some(no_decay=patterns))
    return optimizer


@st.composite
def _precisions(draw: st.DrawFn) -> dict[str, Any]:
    compute = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    formats = st.sampled_from(("fp32", compute))
    precision = {
        "compute": compute,
        "reduce": draw(formats),
        **draw(some(buffers=st.sampled_from(("keep", "fp32", "bf16", "fp16")))),
    }
    if draw(st.booleans()):
        precision |= {"master": compute, **draw(some(accumulate=st.just(compute)))}
    else:
        precision |= draw(some(master=st.just("fp32"), accumulate=formats))
    if compute == "fp16":
        dynamic = some(
            loss_scale=st.just("dynamic"), initial_loss_scale=st.floats(1e-3, 1e9), loss_scale_growth_interval=positive
        )
        precision |= draw(dynamic | st.builds(lambda scale: {"loss_scale": scale}, st.floats(1e-3, 1e9)))
    return precision


@st.composite
def _schedulers(draw: st.DrawFn) -> dict[str, Any]:
    warmup = draw(st.integers(0, 1000))
    climb: dict[str, Any] = {"warmup_steps": warmup}
    if warmup:
        kinds = ("linear", "log") if warmup > 1 else ("linear",)
        climb |= draw(
            some(warmup_type=st.sampled_from(kinds), warmup_start_ratio=st.floats(0, 1), delay_steps=st.integers(0, 3))
        )
    if draw(st.booleans()):
        return {"name": draw(st.sampled_from(("constant", "inverse_sqrt"))), **climb}
    name, falls = draw(st.sampled_from(("linear", "cosine", "wsd"))), draw(positive)
    ending = {"name": name, **climb, "total_steps": warmup + falls, **draw(some(min_lr_ratio=st.floats(0, 1)))}
    if name != "wsd":
        return ending
    kinds = some(decay_type=st.sampled_from(("linear", "cosine", "sqrt")))
    return ending | {"decay_steps": draw(st.integers(1, falls)), **draw(kinds)}
