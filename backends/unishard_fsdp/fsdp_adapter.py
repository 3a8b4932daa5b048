"""The adapter of FSDP2, on any device mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Precision
from unishard.contract.adapter import EngineAdapter
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.optimizer_state import TorchOptimizerState
from unishard.contract.results import Placement
from unishard.contract.trainable import frozen_parameters, set_requires_grad
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import ContractError
from unishard_fsdp import generation, options, root_first
from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.cases.toggled_parameters import ToggledParameters
from unishard_fsdp.cases.unsharded import UnshardedModules, sharded_read
from unishard_fsdp.placement import placement_of
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.released import forget_states
from unishard_fsdp.shards import shard_of
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.stepped_shards import SteppedShards
from unishard_fsdp.torch_gradients import TorchGradients
from unishard_fsdp.unit_forwards import UnitForwards
from unishard_fsdp.unit_parameters import own_names

_DISCARD = PRIVATE_API["discard"]


@final
class FSDPAdapter(EngineAdapter):
    """A model under `fully_shard`."""

    def __init__(
        self,
        spec: FSDPSpec,
        precision: Precision,
        module: nn.Module,
        device: torch.device,
        *,
        forwards: UnitForwards,
        stepped: SteppedShards,
        gradients: TorchGradients,
        cases: Sequence[FSDPCase],
        skippable: Collection[nn.Parameter],
        averages_late: bool,
    ) -> None:
        super().__init__(module, device, stepped.optimizer)
        native = cast(options.FullyShard | options.Replicate, spec.options)
        self._strategy, self._compute = spec.strategy, precision.compute
        self._root, self._forwards = cast(FSDPModule, module), forwards
        self._sharded_modules = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        self._stepped, self._gradients = stepped, gradients
        self.shared_parameters = {name: each for name, each in self.shared_parameters.items() if each not in skippable}
        self._sharded = self.forward_is_collective = isinstance(native, options.FullyShard)
        self._last = True  # torch's default: each backward ends a window
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self.reduces_each_backward = not self._syncs_late
        self._averages_late = averages_late
        self._reshards_late = native.reshard_after_backward == "last_micro_batch"
        self._reshards_in_backward = self._reshards_late
        """Else they are resharded by the update."""
        if self._reshards_late:  # not in a backward that the forward runs
            self._root.set_reshard_after_backward(False)
        self._toggled = ToggledParameters(module, self._modules(), mixed=precision.compute != "fp32")
        self._cases = [self._toggled, *cases]
        self._gathered: Sequence[Any] = ()
        """Sharded modules that stay gathered, inside `unsharded`."""
        self._root_first = root_first.RootFirst(module, self._before_forward)
        # At the root FSDP2 casts too, but not inside a UserDict such as a BatchEncoding (torch 2.13,
        # _fully_shard/_fsdp_state.py).
        self._hooks = cast_inputs((part for part in module.modules() if isinstance(part, FSDPModule)), precision)

    def begin(self, *, last: bool) -> None:
        """Set when FSDP2 reduces and averages between groups."""
        if last is self._last:
            return  # setting a flag traverses all modules
        self._last = last
        for case in self._cases:
            case.begin(last=last)
        if self._syncs_late:
            self._root.set_requires_gradient_sync(last)
        if self._averages_late:
            self._root.set_requires_all_reduce(last)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded module."""
        self._before_forward()
        return self.module(*args, **kwargs)

    def _before_forward(self) -> None:
        for case in self._cases:
            case.before_forward()

    def backward(self, loss: Tensor) -> None:
        """Run autograd in FSDP2's order."""
        reshards = self._reshards_in_backward and self._last
        with ExitStack() as around:
            if reshards:
                self._set_reshard_after_backward(True)
                around.callback(self._set_reshard_after_backward, False)
            for case in self._cases:
                around.enter_context(case.backward(last=self._last))
            self._forwards.order.backward(loss)

    def _set_reshard_after_backward(self, reshard: bool) -> None:
        for _, part in self._sharded_modules:
            part.set_reshard_after_backward(reshard, recurse=False)

    def finish_gradients(self) -> None:
        """FSDP2 has reduced them in the last backward."""
        for case in self._cases:
            case.finish()

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[HostRead, bool | None]:
        """Reshard, and update."""
        self.reshard_all()
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
        self.reshard_all()
        if _DISCARD.needed and _DISCARD.works:
            from unishard_fsdp.private.leaves import drop_unreduced

            drop_unreduced(self._modules())

    def _forget(self) -> None:
        for case in self._cases:
            case.forget()
        self._forwards.order.forget()

    def grad_norm(self) -> Tensor:
        """The norm of the gradients, which `update` uses again."""
        return self._gradients.norm()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """The local tensor of `parameter.grad`."""
        return self._gradients.shard(parameter, create=create)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The local tensor of the parameter, or the master weight of one that is whole."""
        return shard_of(parameter, self._stepped.masters.get(parameter))

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Reshard, to drop gathered copies of the old value."""
        self.reshard_all()
        self.loaded()

    def loaded(self) -> None:
        """Update what cases have copied."""
        for case in self._cases:
            case.written()

    @cached_property
    def optimizer_state(self) -> TorchOptimizerState:
        """Of copies in host memory, or of shards as plain tensors."""
        return TorchOptimizerState(self.torch_optimizer, self.master_shard, self._stepped.tensors)

    def stepped_memory(self) -> Callable[[], Mapping[nn.Parameter, SteppedShard]]:
        """The shards as plain tensors, or their copies in host memory."""
        tensors = self._stepped.tensors
        return lambda: {
            parameter: SteppedShard(tensor) for parameter, tensor in tensors.items() if parameter.grad is not None
        }

    def reshard_all(self) -> None:
        """Reshard every unit."""
        for case in self._cases:
            case.before_reshard()
        # A forward between backward and step leaves units gathered, and the next forward would use the old values.
        for _, part in self._sharded_modules:
            part.reshard()
        for case in self._cases:
            case.after_reshard()

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep the modules that hold these parameters gathered."""
        self._root_first.run()
        case = UnshardedModules(self.module, names)
        self._gathered = case.modules
        self._cases.append(case)
        try:
            with case.gathered(reshards=not self._reshards_late):
                yield
        finally:
            self._cases.remove(case)
            self._gathered = ()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A shard, which is a DTensor, was used with a full tensor."""
        return sharded_read(error, self._units())

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad`."""
        self._toggled.change(for_good=True)
        self.reshard_all()  # in a gathered unit, names refer to gathered copies
        set_requires_grad(self.module, names, trainable)
        self._toggled.watch()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze parameters; reshard first, because gathered copies keep their own `requires_grad`."""
        self._toggled.change(for_good=False)
        self.reshard_all()
        with frozen_parameters(self.module):
            try:
                yield
            finally:
                self.reshard_all()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with the root's parameters gathered."""
        self._before_forward()
        self._root_first.forget()
        with generation.gathering_in_generate(self.module):
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def leaves(self) -> Mapping[str, Tensor]:
        """The gathered parameters."""
        return self._forwards.leaves

    def input_gradients(self, *, graph: bool) -> None:
        """Refuse a graph: FSDP2 frees gathered and cast parameters after a backward, which a backward through gradients
        uses again.

        Raises:
            ContractError: `graph` is true.
        """
        if graph:
            raise ContractError(
                "torch.autograd.grad of an output with create_graph=True, as for a gradient penalty, does not work "
                f"with sharding.strategy {self._strategy} in {self._compute} on FSDP2, which frees parameters after "
                "each backward; set sharding: no_shard and precision: fp32 with backend fsdp"
            )

    def gradients_in_forward(self) -> None:
        """Refuse them unless all parameters stay gathered: FSDP2 takes them for the backward, and frees parameters.

        A backward through them reads parameters of modules that it has left.

        Raises:
            ContractError: Not all parameters stay gathered.
        """
        self._reshards_in_backward = False
        if not (self._reshards_late or all(part in self._gathered for part in self._modules() if own_names(part))):
            raise ContractError(
                "the forward computes gradients of its own, as by torch.autograd.grad(energy, positions), for which "
                f"FSDP2 frees parameters with sharding.strategy {self._strategy}; put the forward and the backward "
                "into a block `with engine.weights.unsharded(names):` with the names of all parameters, as of "
                "model.named_parameters() before unishard.prepare"
            )

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        trained = [self._stepped.masters.get(each, each) for each in self._gradients.parameters]
        return placement_of(self.module, FSDPModule.__name__, units=self._units(), masters=trained)

    def _units(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._sharded_modules if name) if self._sharded else ()

    def _modules(self) -> list[nn.Module]:
        return [cast(nn.Module, part) for _, part in self._sharded_modules]

    def releasing(self) -> Callable[[], None]:
        """Let torch forget that it has sharded the modules."""
        PRIVATE_API["released-modules"].require()
        return partial(forget_states, [*self.module.modules()])

    def close(self) -> None:
        """Free the gradients, and remove the hooks from the model; torch's stay with it."""
        self._gradients.drop()
        for case in self._cases:
            case.close()
        self._stepped.close()
        self._root_first.forget()
        self._forwards.close()
        for hook in self._hooks:
            hook.remove()
