"""A model of which each rank has slices of the weights, until it is closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import nn

from unishard.errors import ModelError
from unishard.parallel.groups import Groups
from unishard.parallel.tensor.applied import apply_styles, has_slices
from unishard.parallel.tensor.block_proof import BlockProof
from unishard.parallel.tensor.blocks import blocks_of
from unishard.parallel.tensor.cutter import Cutter
from unishard.parallel.tensor.plan import rules_of, styled
from unishard.parallel.tensor.proof import FirstForward


class TensorSlices:
    """What a rank has of a model."""

    def __init__(self, model: nn.Module, plan: Literal["auto"] | Mapping[str, str], groups: Groups) -> None:
        """Cut a model.

        Args:
            model: Not sharded yet.
            plan: Styles by names of modules and parameters, `*` for a number; `auto` for the model's own.
            groups: Of this rank.

        Raises:
            ModelError: It cannot be cut; it is as before.
        """
        self._model = model
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._experts = {module for module in self._modules.values() if has_slices(module)}
        """Those that are divided whole, by `parallel.expert`."""
        self._cutter = Cutter(self._modules, groups)
        self._proof: BlockProof | None = None
        try:
            styles = styled(rules_of(model, plan), self._names(), all_match=plan != "auto")
            self._cut({name: style for name, style in styles.items() if self._owner(name) not in self._experts})
            self._watch(groups)
        except BaseException:
            self.close()
            raise

    def _names(self) -> Iterator[str]:
        yield from self._modules
        yield from (name for name, _ in self._model.named_parameters(remove_duplicate=False))

    def _cut(self, styles: dict[str, str]) -> None:
        groups = self._cutter.groups
        if groups.peers is not None:
            blocks = blocks_of(self._model, self._modules, styles, self._experts)
            self._proof = BlockProof(self._model, blocks, groups)
            self._cutter.put.callback(self._proof.close)
        apply_styles(self._cutter, self._modules, styles)
        if not self._cutter.slices:
            raise ModelError(
                f"parallel.tensor: the plan cuts nothing of {type(self._model).__name__} over "
                f"{self._cutter.groups.size} ranks; write parallel.tensor.plan, or choose another size"
            )

    def _owner(self, name: str) -> nn.Module:
        """The module of a name, or with the parameter of a name."""
        return self._modules[name if name in self._modules else name.rpartition(".")[0]]

    def _watch(self, groups: Groups) -> None:
        if groups.peers is not None:
            whole = {name: each for name, each in self._modules.items() if name and self._cutter.uses_whole(each)}
            self._cutter.put.callback(FirstForward(self._model, whole, groups.peers).close)

    def count_gradients(self, *, over_holders: bool) -> None:
        """Multiply the gradients of slices so that what the engine makes of them is the mean over all ranks.

        Args:
            over_holders: Whether it averages them over their holders; if not, it divides their sum by all ranks.
        """
        self._cutter.factor = 1.0 if over_holders else float(self._cutter.groups.size)

    def prove(self) -> None:
        """As in `SlicedModel`."""
        if self._proof is not None:
            self._proof.prove()

    def let_go(self) -> None:
        """Keep no full tensors any more: the engine is about to shard what is left."""
        self._cutter.full.pop_all()

    def close(self) -> None:
        """Leave the modules as they were, and the tensors that were not let go."""
        self._cutter.close()
