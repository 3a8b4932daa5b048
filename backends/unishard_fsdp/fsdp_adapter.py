"""The adapter of FSDP2, on any device mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Precision
from unishard.contract.adapter import EngineAdapter
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.kit.skipping import DeviceSkip
from unishard.contract.optimizer_state import TorchOptimizerState
from unishard.contract.results import Placement
from unishard.contract.trainable import frozen_parameters, set_requires_grad
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import ContractError
from unishard_fsdp import gathering, generation, options, root_first
from unishard_fsdp.conditional import ConditionalParameters
from unishard_fsdp.dimensionless import parameter_named
from unishard_fsdp.embeddings import UngatheredEmbeddings
from unishard_fsdp.host_copies import HostCopies
from unishard_fsdp.parameter_usage import own_names
from unishard_fsdp.placement import placement_of
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.released import forget_states
from unishard_fsdp.replicated_parameters import ReplicatedParameters
from unishard_fsdp.shards import shard_of
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.stepped_shards import ShardViews, SteppedShards
from unishard_fsdp.toggled_parameters import ToggledParameters
from unishard_fsdp.torch_gradients import TorchGradients
from unishard_fsdp.unit_forwards import UnitForwards
from unishard_fsdp.unreduced_gradients import UnreducedGradients

_DISCARD, _DTYPES = PRIVATE_API["discard"], PRIVATE_API["trainable-dtypes"]

_logger = logging.getLogger("unishard")


@final
class FSDPAdapter(EngineAdapter):
    """A model under `fully_shard`."""

    def __init__(
        self,
        spec: FSDPSpec,
        precision: Precision,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.FullyShard | options.Replicate,
        root: FSDPModule,
        forwards: UnitForwards,
        conditional: ConditionalParameters,
        replicated: ReplicatedParameters,
        embeddings: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(module, device, optimizer)
        self._strategy, self._compute = spec.strategy, precision.compute
        self._root, self._forwards = root, forwards
        self._replicated = replicated
        self._sharded_modules = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        self._on_host: HostCopies | None = None
        if isinstance(native, options.FullyShard) and native.host_optimizer:
            pin_memory = native.host_optimizer.pin_memory and device.type == "cuda"
            units = [_own_parameters(part) for part in reversed(self._modules())]  # as backward reduces them
            self._on_host = HostCopies(optimizer, replicated.masters, device, units, pin_memory=pin_memory)
        self._stepped: SteppedShards = self._on_host or ShardViews(optimizer, replicated.masters)
        trained = [*self.shared_parameters.values()]
        self._gradients = TorchGradients(
            trained,
            device,
            self._stepped,
            steps_always=spec.steps_always,
            copies=_copies(native),
            skip=None if self._on_host else DeviceSkip(optimizer),
            own_hooks=self._stepped.hooks,
            before_change=self._on_host.gradients.change if self._on_host else lambda: None,
            replicated=replicated,
        )
        skippable = set(trained if native.reduce_scatter_unused_params else conditional.parameters)
        skippable.update(replicated.trained)
        self.shared_parameters = {name: each for name, each in self.shared_parameters.items() if each not in skippable}
        self._sharded = self.forward_is_collective = isinstance(native, options.FullyShard)
        self._last = True  # torch's default: each backward ends a window
        self._mixed = precision.compute != "fp32"
        self._ran = False
        self._toggled = ToggledParameters(module)
        self._stale_dtypes = False
        """Whether the first forward found trainable parameters frozen, when FSDP2 determines the dtypes of trainable
        ones."""
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self.reduces_each_backward = not self._syncs_late
        self._averages_late = averages_late(native)
        self._reshards_late = native.reshard_after_backward == "last_micro_batch"
        self._reshards_in_backward = self._reshards_late
        """Else they are resharded by the update."""
        if self._reshards_late:  # not in a backward that the forward runs
            root.set_reshard_after_backward(False)
        self._unreduced = UnreducedGradients(
            self._modules(), waits=self._syncs_late, mixed=self._mixed, between_groups=self._averages_late
        )
        self._conditional = conditional
        self._embeddings = UngatheredEmbeddings(embeddings)
        if conditional.parameters:
            from unishard_fsdp.private.conditional import fill_unused

            self._unreduced.patch_all()
            fill_unused(self._modules(), set(conditional.parameters), conditional.used)
        self._root_first = root_first.RootFirst(module, self._look_at_frozen)
        self._unsharded = gathering.UnshardedModules(module)
        # At the root FSDP2 casts too, but not inside a UserDict such as a BatchEncoding (torch 2.13,
        # _fully_shard/_fsdp_state.py).
        self._hooks = cast_inputs((part for part in module.modules() if isinstance(part, FSDPModule)), precision)

    def begin(self, *, last: bool) -> None:
        """Set when FSDP2 reduces, averages between groups, and reshards."""
        if last is self._last:
            return  # setting a flag traverses all modules
        self._last = last
        if self._on_host:
            self._on_host.gradients.last = last
        if not last:
            self._unreduced.begin()
        if self._syncs_late:
            self._root.set_requires_gradient_sync(last)
        if self._averages_late:
            self._root.set_requires_all_reduce(last)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded module."""
        self._look_at_frozen()
        self._unsharded.set_reshard_after_backward(False)  # the forward may compute gradients of its own
        return self.module(*args, **kwargs)

    def _look_at_frozen(self) -> None:
        if self._toggled.look() and self._mixed and not self._ran:
            _DTYPES.require()
            self._stale_dtypes = True
        self._ran = True

    def backward(self, loss: Tensor) -> None:
        """Run autograd in FSDP2's order, with patches for unreduced gradients."""
        self._toggled.restore()
        self._embeddings.look()
        if self._stale_dtypes:
            self._refresh_trainable()
            self._stale_dtypes = not self._toggled.all_trainable()
        reshards = self._reshards_in_backward and self._last
        with (
            self._replicated.backward(last=self._last),
            self._unreduced.backward(last=self._last),
            self._unsharded.resharding(self._modules()) if reshards else nullcontext(),
        ):
            self._forwards.order.backward(loss)
            self._unsharded.reduce_late()

    def finish_gradients(self) -> None:
        """Find the parameters of conditional modules that no rank has used."""
        self._conditional.find()
        self._replicated.average()

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[HostRead, bool | None]:
        """Reshard, and update."""
        self.reshard_all()
        self._conditional.find()
        self._replicated.average()
        outcome = self._gradients.update(max_norm, divisor)
        self._end_window()
        self._conditional.forget()
        self._replicated.forget()
        self._forwards.order.forget()
        return outcome

    def drop_gradients(self) -> None:
        """Drop gradients, also unreduced ones, and a forward without a backward."""
        if self._syncs_late or self._averages_late:
            _DISCARD.require()
        self._gradients.drop()
        self._end_window()
        self._conditional.forget()
        self._replicated.forget()
        self._forwards.order.forget()
        self._unreduced.forget()
        if hasattr(self._root, "reset_iter_state"):  # from torch 2.13 on
            self._root.reset_iter_state()
        self.reshard_all()
        if _DISCARD.needed and _DISCARD.works:
            from unishard_fsdp.private.leaves import drop_unreduced

            drop_unreduced(self._modules())

    def _end_window(self) -> None:
        if self._on_host:
            self._on_host.gradients.end_window()

    def grad_norm(self) -> Tensor:
        """The norm of the gradients, which `update` uses again."""
        return self._gradients.norm()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """The local tensor of `parameter.grad`."""
        return self._gradients.shard(parameter, create=create)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The local tensor of the parameter, or the master weight of one that is whole."""
        return shard_of(parameter, self._replicated.masters.get(parameter))

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Reshard, to drop gathered copies of the old value."""
        self.reshard_all()
        if parameter in self._replicated.masters:
            parameter.data.copy_(full)

    def loaded(self) -> None:
        """Update whole parameters from their master weights."""
        self._replicated.copy_masters()

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
        self._toggled.restore()
        # A forward between backward and step leaves units gathered, and the next forward would use the old values.
        for _, part in self._sharded_modules:
            part.reshard()
        self._unsharded.gather_again()

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep the modules that hold these parameters gathered."""
        self._root_first.run()
        with self._unsharded.gathered(names):
            try:
                yield
            finally:
                self._unsharded.set_reshard_after_backward(not self._reshards_late)

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A shard, which is a DTensor, was used with a full tensor."""
        return gathering.sharded_read(error, self._units())

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad`, and update FSDP2's dtypes."""
        if self._mixed:
            _DTYPES.require()
        self.reshard_all()  # in a gathered unit, names refer to gathered copies
        set_requires_grad(self.module, names, trainable)
        self._toggled.watch()
        if self._mixed:
            self._refresh_trainable()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze parameters; reshard first, because gathered copies keep their own `requires_grad`."""
        changes_dtypes = self._mixed and not self._ran
        if changes_dtypes:
            _DTYPES.require()
        self.reshard_all()
        try:
            with frozen_parameters(self.module):
                try:
                    yield
                finally:
                    self.reshard_all()
        finally:
            if changes_dtypes:
                self._refresh_trainable()

    def _refresh_trainable(self) -> None:
        from unishard_fsdp.private.leaves import refresh_trainable

        if _DTYPES.needed:
            refresh_trainable(self._modules())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with the root's parameters gathered."""
        self._look_at_frozen()
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
        if not (self._reshards_late or self._unsharded.holds_all(self._modules())):
            raise ContractError(
                "the forward computes gradients of its own, as by torch.autograd.grad(energy, positions), for which "
                f"FSDP2 frees parameters with sharding.strategy {self._strategy}; put the forward and the backward "
                "into a block `with engine.weights.unsharded(names):` with the names of all parameters, as of "
                "model.named_parameters() before unishard.prepare"
            )

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        return placement_of(self.module, FSDPModule.__name__, units=self._units(), masters=self._masters())

    def _masters(self) -> list[Tensor]:
        return [self._replicated.weights(parameter) for parameter in self._gradients.parameters]

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
        if self._on_host:
            self._on_host.gradients.close()
        self._stepped.close()
        self._replicated.close()
        self._root_first.forget()
        self._forwards.close()
        for hook in self._hooks:
            hook.remove()


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter_named(module, name) for name in own_names(module)]


def _copies(native: options.FullyShard | options.Replicate) -> int:
    """Number of copies of each gradient over all ranks."""
    if isinstance(native, options.Replicate):
        return dist.get_world_size()
    return native.mesh.replicate if native.mesh else 1


def averages_late(native: options.FullyShard | options.Replicate) -> bool:
    """Whether gradients are averaged between groups only at the end of a window, if this torch supports it."""
    if not isinstance(native, options.FullyShard) or native.requires_all_reduce != "last_micro_batch":
        return False
    hybrid = PRIVATE_API["hybrid-accumulation"]
    if not hybrid.works and dist.get_rank() == 0:
        _logger.warning("%s", hybrid.refusal())
    return hybrid.works
