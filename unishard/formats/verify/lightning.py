"""What Lightning makes of the Python that we write: the strategy and the Trainer that it builds."""

from __future__ import annotations

import inspect
import logging
import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from unishard.formats.verify.deepspeed import settings_of as deepspeed_settings
from unishard.formats.verify.settings import KEPT, clipping

_WORDS = {"32": "fp32", "bf16": "bf16", "16": "fp16"}
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_SHARDING = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": KEPT,
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": f"hybrid_{KEPT}",
}


def settings_of(text: str, ranks: int) -> dict[str, Any]:
    """The settings of the objects that the code builds. Raises what Lightning raises."""
    namespace: dict[str, Any] = {}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        exec(compile(text, "<lightning>", "exec"), namespace)  # what unishard itself wrote
        given: dict[str, Any] = {}
        namespace |= {name: _checked(each) for name, each in namespace.items() if _is_logger(each)}
        namespace["Trainer"] = lambda **arguments: given.update(_bound(arguments))
        namespace["seed_everything"] = lambda seed, workers=True: given.update(seed=seed)
        namespace["trainer"]()
    return _of_trainer(given) | _of_strategy(namespace["strategy"], ranks)


def _is_logger(value: Any) -> bool:
    return isinstance(value, type) and value.__module__.startswith("lightning.pytorch.loggers")


def _checked(logger: type) -> Any:
    """In the place of a logger, which would make files and need its package. Raises TypeError for a wrong argument."""
    return lambda **arguments: inspect.signature(logger).bind(**arguments).arguments


def _bound(arguments: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments with its defaults: it cannot be built for another device than there is.

    Raises TypeError for a wrong one.
    """
    from lightning.pytorch import Trainer

    bound = inspect.signature(Trainer).bind(**arguments)
    bound.apply_defaults()
    return bound.arguments


def _of_strategy(strategy: Any, ranks: int) -> dict[str, Any]:
    kind = type(strategy).__name__
    if kind == "DeepSpeedStrategy":
        own = dict(deepspeed_settings(strategy.config, ranks))
        return {field: value for field, value in own.items() if field.startswith(("sharding.", "offload."))}
    if kind == "FSDPStrategy":
        place = "cpu" if strategy.cpu_offload.offload_params else "none"
        name = strategy.sharding_strategy.name
        mixed = strategy.mixed_precision_config
        compute = (
            {"precision.compute": _DTYPES.get(str(mixed.param_dtype), "fp32")} if mixed and mixed.param_dtype else {}
        )
        return compute | {
            "sharding.strategy": _SHARDING.get(name, name),
            "offload.params": place,
            "offload.optimizer": place,
            "sharding.units": "auto" if strategy.kwargs.get("auto_wrap_policy") else "none",
        }
    return {"sharding.strategy": "no_shard"}


def _of_trainer(given: dict[str, Any]) -> dict[str, Any]:
    plugins = given["plugins"] if isinstance(given["plugins"], list) else [given["plugins"]]
    chosen = next((plugin.precision for plugin in plugins if hasattr(plugin, "precision")), given["precision"])
    word = str(chosen or "32").partition("-")[0]
    found = {
        "precision.compute": _WORDS.get(word, word),
        "training.gradient_accumulation_steps": given["accumulate_grad_batches"],
        "training.gradient_clipping": clipping(given["gradient_clip_val"]),
    }
    return found | ({"training.seed": given["seed"]} if "seed" in given else {})
