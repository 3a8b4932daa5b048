"""Find the units of a model: the modules whose parameters are gathered together, the same for every engine.

Llama                       with `units: auto`
├── embed_tokens            unit: an embedding outside the blocks, if nothing outside it is tied to or reads its weight
├── layers.0 .. layers.n    units: the repeated blocks
└── norm, lm_head           no unit: stay with the root, which is needed last in forward and first in backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches

from torch import nn

from unishard.config import Sharding
from unishard.contract.kit.replicated import matching
from unishard.contract.units import ModelUnits, Unit, numel_of
from unishard.engine.model.outside_reads import embeddings_read_outside
from unishard.errors import ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(model: nn.Module, cfg: Sharding) -> ModelUnits:
    """Find the units of a model.

    Args:
        model: Any module, not yet sharded.
        cfg: The section `sharding`.

    Raises:
        ModelError: As in `find_units` and `find_conditional`.
    """
    conditional = find_conditional(model, cfg)
    if cfg.strategy == "no_shard":
        return ModelUnits((), find_units(model, Sharding(conditional_modules=cfg.conditional_modules)), conditional)
    gathered = find_units(model, cfg)
    return ModelUnits(gathered, gathered, conditional)


def find_units(model: nn.Module, cfg: Sharding) -> list[Unit]:
    """Find the units of a model, in module order, without the root.

    Args:
        model: Any module, not yet sharded.
        cfg: The section `sharding`; modules smaller than `min_unit_params` belong to the unit around them, and those of
            which `replicate` leaves nothing to gather are none.

    Raises:
        ModelError: A named class matches no module, or `min_unit_params` is larger than every unit; lists the
            candidates.
    """
    conditional = find_conditional(model, cfg)
    if cfg.units == "auto":
        units = [*_outermost(model, _block_classes(model), "sharding.units", set(cfg.conditional_modules))]
        inside = {id(module) for unit in (*units, *conditional) for module in unit.module.modules()}
        inside |= {id(module) for module in embeddings_read_outside(model)}
        units += [
            Unit(name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and id(module) not in inside
        ]
    else:
        _require_present(model, set(cfg.units), "sharding.units")
        units = [*_outermost(model, set(cfg.units), "sharding.units", set(cfg.conditional_modules))]
    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    own = [unit for unit in _in_order(model, units) if not _ties_outside(unit, shared)]
    if cfg.units != "auto":
        _require_used(cfg.units, units, own)
    whole = matching(model, cfg.replicate)
    own = [unit for unit in own if not all(id(parameter) in whole for parameter in unit.module.parameters())]
    large = [unit for unit in own if unit.numel >= cfg.min_unit_params]
    if own and not large:
        sizes = ", ".join(f"{unit.name} ({type(unit.module).__name__}, {unit.numel:,})" for unit in own[:8])
        raise ModelError(
            f"sharding.min_unit_params: {cfg.min_unit_params:,} is larger than every unit; the candidates are {sizes}"
        )
    return large


def find_conditional(model: nn.Module, cfg: Sharding) -> list[Unit]:
    """Find the modules of `conditional_modules`: those that a rank may skip in a micro-batch.

    Raises:
        ModelError: A named class matches no module; lists the candidates.
    """
    return find_classes(model, cfg.conditional_modules, "sharding.conditional_modules")


def find_classes(model: nn.Module, classes: Iterable[str], field: str) -> list[Unit]:
    """Find the modules of some classes, without the root; of nested ones, the outer.

    Args:
        model: Any module, not yet sharded.
        classes: Class names.
        field: The config field, for messages.

    Raises:
        ModelError: A named class matches no module; lists the candidates.
    """
    _require_present(model, set(classes), field)
    return [*_outermost(model, set(classes), field)]


def find_blocks(model: nn.Module, cfg: Sharding, field: str) -> list[Unit]:
    """Find the repeated blocks of a model, of any size, without embeddings.

    Args:
        model: Any module, not yet sharded.
        cfg: The section `sharding`; `units` names the classes of the blocks, or is `auto`.
        field: The config field, for messages.

    Raises:
        ModelError: There are no blocks; lists the classes that could be named.
    """
    classes = _block_classes(model) if cfg.units == "auto" else set(cfg.units)
    units = [*_outermost(model, classes, field)]
    if not units:
        raise ModelError(f"{field}: {type(model).__name__} has no repeated blocks; its {_candidates(model)}")
    return units


def _block_classes(model: nn.Module) -> set[str]:
    """Classes of repeated blocks: `_no_split_modules` of a Hugging Face model, else the class of siblings with
    parameters.
    """
    declared = set(getattr(model, "_no_split_modules", None) or ())
    present = {type(module).__name__ for module in model.modules()}
    if declared & present:
        return declared & present
    repeated: set[str] = set()
    level = [model]
    while level:  # level by level, so that modules inside a repeated block are not searched
        families = [[child for child in parent.children() if numel_of(child)] for parent in level]
        for family in families:
            counts = Counter(
                type(child).__name__ for child in family if not isinstance(child, (*_CONTAINERS, nn.Embedding))
            )
            repeated |= {name for name, count in counts.items() if count > 1}
        level = [child for family in families for child in family if type(child).__name__ not in repeated]
    return repeated


def _outermost(
    model: nn.Module, classes: set[str], field: str, closed: Collection[str] = (), prefix: str = ""
) -> Iterator[Unit]:
    """Yield modules of some classes; does not search inside them, nor inside modules of a `closed` class."""
    for name, child in model.named_children():
        if type(child).__name__ in closed:
            continue
        if type(child).__name__ in classes and numel_of(child):
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                kind = type(child).__name__
                raise ModelError(
                    f"{field}: {prefix}{name} is a {kind}, which has no forward; name the class of its elements"
                )
            yield Unit(prefix + name, child)
        else:
            yield from _outermost(child, classes, field, closed, f"{prefix}{name}.")


def _in_order(model: nn.Module, units: list[Unit]) -> list[Unit]:
    order = {id(module): index for index, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[id(unit.module)])


def _ties_outside(unit: Unit, shared: dict[int, int]) -> bool:
    inside = Counter(id(parameter) for _, parameter in unit.module.named_parameters(remove_duplicate=False))
    return any(count < shared[key] for key, count in inside.items())


def _require_present(model: nn.Module, classes: set[str], field: str) -> None:
    if not classes:
        return
    sizes = _sizes(model)
    absent = sorted(classes - sizes.keys())
    if absent:
        near = get_close_matches(absent[0], sizes, 1)
        hint = f"did you mean {near[0]}? Its" if near else "its"
        raise ModelError(
            f"{field}: no module of class {', '.join(absent)} in {type(model).__name__}; {hint} {_candidates(model)}"
        )


def _sizes(model: nn.Module) -> dict[str, int]:
    """Elements of a module of each class with parameters."""
    return {
        type(module).__name__: numel_of(module)
        for module in model.modules()
        if module is not model and numel_of(module)
    }


def _candidates(model: nn.Module) -> str:
    sizes, counts = _sizes(model), Counter(type(module).__name__ for module in model.modules())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:12]
    return "classes with parameters are " + ", ".join(
        f"{name} (x{counts[name]}, {sizes[name]:,} parameters each)" for name in largest
    )


def _require_used(classes: Iterable[str], units: list[Unit], own: list[Unit]) -> None:
    """Raise unless every class that the user named gives a unit."""
    for name in classes:
        if any(type(unit.module).__name__ == name for unit in own):
            continue
        if any(type(unit.module).__name__ == name for unit in units):
            raise ModelError(
                f"sharding.units: every {name} shares a weight with a module outside it, and tied weights must stay "
                "together; name a class that contains both, or remove it"
            )
        raise ModelError(
            f"sharding.units: every {name} lies inside another unit; remove it, or the class around it (in units or "
            "conditional_modules)"
        )
