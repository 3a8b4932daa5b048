"""The updates of a model under `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import cast, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.contract.adapter import Updates
from unishard.contract.optimizer_state import TorchOptimizerState
from unishard.contract.trainable import frozen_parameters, set_requires_grad
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import ContractError
from unishard_fsdp.cases.toggled_parameters import ToggledParameters
from unishard_fsdp.gradients.stepped_shards import SteppedShards
from unishard_fsdp.gradients.torch_gradients import TorchGradients
from unishard_fsdp.model import FSDPModel
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.units.unit_parameters import own_names

_DISCARD = PRIVATE_API["discard"]


@final
class FSDPUpdates(Updates):
    """Gradients that FSDP2 reduces in backward, and the optimizer of their shards."""

    model: FSDPModel

    def __init__(
        self,
        model: FSDPModel,
        gradients: TorchGradients,
        stepped: SteppedShards,
        toggled: ToggledParameters,
        *,
        averages_late: bool,
        skippable: Collection[nn.Parameter],
    ) -> None:
        """Take over the model, before its first forward.

        Args:
            model: Sharded, with the cases of its run.
            gradients: Of all that trains.
            stepped: What the optimizer steps.
            toggled: The case that knows of changes of `requires_grad`.
            averages_late: Whether gradients are averaged between groups only in the last micro-batch of a window.
            skippable: Parameters that a rank may skip.
        """
        super().__init__(model, stepped.optimizer)
        self._gradients, self._stepped, self._toggled = gradients, stepped, toggled
        self._syncs_late = model.native.requires_gradient_sync == "last_micro_batch"
        self._averages_late = averages_late
        self.reduces_each_backward = not self._syncs_late
        self.shared_parameters = {name: each for name, each in self.shared_parameters.items() if each not in skippable}
        self._root = cast(FSDPModule, model.module)
        self._last = True  # torch's default: each backward ends a window
        self._reshards_in_backward = model.reshards_late
        """Else they are resharded by the update."""
        if model.reshards_late:  # not in a backward that the forward runs
            self._root.set_reshard_after_backward(False)

    def begin(self, *, last: bool) -> None:
        """Set when FSDP2 reduces and averages between groups."""
        if last is self._last:
            return  # setting a flag traverses all modules
        self._last = last
        for case in self.model.cases:
            case.begin(last=last)
        if self._syncs_late:
            self._root.set_requires_gradient_sync(last)
        if self._averages_late:
            self._root.set_requires_all_reduce(last)

    def backward(self, loss: Tensor) -> None:
        """Run autograd in FSDP2's order."""
        reshards = self._reshards_in_backward and self._last
        with ExitStack() as around:
            if reshards:
                self._set_reshard_after_backward(True)
                around.callback(self._set_reshard_after_backward, False)
            for case in self.model.cases:
                around.enter_context(case.backward(last=self._last))
            self.model.forwards.order.backward(loss)

    def _set_reshard_after_backward(self, reshard: bool) -> None:
        for part in self.model.sharded.values():
            part.set_reshard_after_backward(reshard, recurse=False)

    def finish_gradients(self) -> None:
        """FSDP2 has reduced them in the last backward."""
        for case in self.model.cases:
            case.finish()

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[HostRead, bool | None]:
        """Reshard, and update."""
        self.model.reshard_all()
        self.finish_gradients()
        outcome = self._gradients.update(max_norm, divisor)
        self._forget()
        return outcome

    def drop_gradients(self) -> None:
        """Drop gradients, also unreduced ones, and a forward without a backward."""
        if self._syncs_late or self._averages_late:
            _DISCARD.require()
        self._gradients.drop()
        self._forget()
        if hasattr(self._root, "reset_iter_state"):  # from torch 2.13 on
            self._root.reset_iter_state()
        self.model.reshard_all()
        if _DISCARD.needed and _DISCARD.works:
            from unishard_fsdp.private.leaves import drop_unreduced

            drop_unreduced(self.model.modules())

    def _forget(self) -> None:
        for case in self.model.cases:
            case.forget()
        self.model.forwards.order.forget()

    def grad_norm(self) -> Tensor:
        """The norm of the gradients, which `update` uses again."""
        return self._gradients.norm()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """The local tensor of `parameter.grad`."""
        return self._gradients.shard(parameter, create=create)

    @cached_property
    def optimizer_state(self) -> TorchOptimizerState:
        """Of copies in host memory, or of shards as plain tensors."""
        return TorchOptimizerState(self.torch_optimizer, self.model.master_shard, self._stepped.tensors)

    def stepped(self) -> Sequence[Tensor]:
        """The shards as plain tensors, or their copies in host memory."""
        return [*self._stepped.tensors.values()]

    def stepped_memory(self) -> Callable[[], Mapping[nn.Parameter, SteppedShard]]:
        """The shards as plain tensors, or their copies in host memory."""
        tensors = self._stepped.tensors
        return lambda: {
            parameter: SteppedShard(tensor) for parameter, tensor in tensors.items() if parameter.grad is not None
        }

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad`."""
        self._toggled.change(for_good=True)
        self.model.reshard_all()  # in a gathered unit, names refer to gathered copies
        set_requires_grad(self.model.module, names, trainable)
        self._toggled.watch()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze parameters; reshard first, because gathered copies keep their own `requires_grad`."""
        self._toggled.change(for_good=False)
        self.model.reshard_all()
        with frozen_parameters(self.model.module):
            try:
                yield
            finally:
                self.model.reshard_all()

    def leaves(self) -> Mapping[str, Tensor]:
        """The gathered parameters."""
        return self.model.forwards.leaves

    def input_gradients(self, *, graph: bool) -> None:
        """Refuse a graph: FSDP2 frees gathered and cast parameters after a backward, which a backward through gradients
        uses again.

        Raises:
            ContractError: `graph` is true.
        """
        model = self.model
        if graph:
            raise ContractError(
                "torch.autograd.grad of an output with create_graph=True, as for a gradient penalty, does not work "
                f"with sharding.strategy {model.strategy} in {model.precision.compute} on FSDP2, which frees "
                "parameters after each backward; set sharding: no_shard and precision: fp32 with backend fsdp"
            )

    def gradients_in_forward(self) -> None:
        """Refuse them unless all parameters stay gathered: FSDP2 takes them for the backward, and frees parameters.

        A backward through them reads parameters of modules that it has left.

        Raises:
            ContractError: Not all parameters stay gathered.
        """
        model, self._reshards_in_backward = self.model, False
        if not (model.reshards_late or all(part in model.kept for part in model.modules() if own_names(part))):
            raise ContractError(
                "the forward computes gradients of its own, as by torch.autograd.grad(energy, positions), for which "
                f"FSDP2 frees parameters with sharding.strategy {model.strategy}; put the forward and the backward "
                "into a block `with engine.weights.unsharded(names):` with the names of all parameters, as of "
                "model.named_parameters() before unishard.prepare"
            )

    def close(self) -> None:
        """Free the gradients."""
        self._gradients.drop()
        self._stepped.close()
