"""The adapter of a `DeepSpeedEngine`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.contract.adapter import EngineAdapter
from unishard.contract.private_api import PrivateApi
from unishard.contract.results import Placement
from unishard.contract.units import Unit
from unishard.distributed.dtypes import name_of
from unishard.distributed.host_read import HostRead
from unishard.distributed.nested_tensors import hook_gradients
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import CheckpointError, ContractError
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.cases.replaced_parameters import explain
from unishard_deepspeed.gathering import is_of_shard, keep_gathered, refuse_unused_output
from unishard_deepspeed.optimizer_state import ZeroOptimizerState
from unishard_deepspeed.placement import parameter_bytes, units
from unishard_deepspeed.private.building import forget
from unishard_deepspeed.private.partitioned import gather
from unishard_deepspeed.private.shown_parameters import ShownParameters
from unishard_deepspeed.private.window import WindowGradients
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer
from unishard_deepspeed.unused_parameters import UnusedParameters

_requires_grad = attrgetter("requires_grad")


@final
class DeepSpeedAdapter(EngineAdapter):
    """Implements `EngineAdapter` on a `DeepSpeedEngine`."""

    def __init__(
        self,
        zero: ZeroOptimizer,
        device: torch.device,
        hooks: Sequence[RemovableHandle],
        cases: Sequence[ZeroCase],
        entered: Sequence[Unit],
        skippable: Collection[nn.Parameter],
        missing: Sequence[PrivateApi],
    ) -> None:
        engine, inner, spec = zero.engine, zero.inner, zero.spec
        super().__init__(engine.module, device, zero.optimizer)
        self._strategy = spec.strategy
        self._in_files = spec.params_in_files
        self._engine = engine
        self._zero = zero
        placed = zero.placed_masters()
        self._master_dtypes = frozenset(name_of(master.dtype) for master in placed)
        self._master_numel = sum(master.numel() for master in placed)
        self._clipping = zero.clipping()
        self._window = WindowGradients(zero)
        self._hooks = hooks
        """Hooks on the model, removed with the engine."""
        # Not the method, which the engine sets later.
        self._shown = ShownParameters(engine.module, lambda parameter: self.read_gradient(parameter))
        self._cases, self._entered = cases, entered
        self._kept: dict[nn.Parameter, None] = {}
        """Parameters that stay gathered, inside `unsharded` at stage 3."""
        self.forward_is_collective = zero.gathers
        self.reduces_each_backward = engine.zero_optimization_partition_gradients()
        trained = set(inner.trained).difference(skippable)
        self.shared_parameters = {
            name: parameter for name, parameter in engine.module.named_parameters() if parameter in trained
        }
        in_order = self.reduces_each_backward and not zero.gathers
        self._unused = UnusedParameters(
            zero,
            device,
            missing,
            [*self.shared_parameters.values()] if in_order else [],
            alike=spec.compares_ranks and not skippable,
        )
        self.optimizer_state = ZeroOptimizerState(zero, self._unused.masters)
        if getattr(inner.optimizer, "steps_late", False):
            self.calls_in_update = zero.calls_in_update()
        # Before DeepSpeed's hooks on the outputs, which fail at some stages if a backward is not the engine's.
        # A function, not a method: copying the model, for example to average weights, must not copy the engine.
        self._output_hook = engine.module.register_forward_hook(
            lambda module, args, output: self._watch_early(module, output)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the `DeepSpeedEngine`; the model itself if the script has frozen all of it, as a discriminator for the
        generator's loss, whose backward DeepSpeed's hooks on the outputs would take for their own.
        """
        if not any(map(_requires_grad, self._zero.inner.trained)):
            with self._shown.inside_forward(show=not self.module.training):
                return self.module(*args, **kwargs)
        for case in self._cases:
            case.before_forward()
        try:
            with self._shown.inside_forward(show=not self.module.training):
                return self._engine(*args, **kwargs)
        except (AttributeError, RuntimeError) as error:
            explain(error, self.module)
            raise

    def watch(self, output: Any) -> None:
        """Show parameters to the script: a hook on the model has watched the output before DeepSpeed's hooks on it."""
        self._shown.show()

    def _watch_early(self, module: nn.Module, output: Any) -> None:
        if module is self.module:  # not a copy of it
            hook_gradients(output, self.on_gradient)

    def input_gradients(self, *, graph: bool) -> None:
        """Refuse what DeepSpeed's hooks on outputs take for its own backward.

        Stage 0 then raises, stages 1 and 2 reduce too early, and all divide the gradient by the accumulation steps
        (DeepSpeed 0.19.8, runtime/engine.py, _backward_prologue_per_tensor). Stage 3 frees parameters that a backward
        through gradients uses again.

        Raises:
            ContractError: The engine cannot do this.
        """
        plain = self.forward_is_collective and self._engine.gradient_accumulation_steps() == 1 and not graph
        if plain or not any(map(_requires_grad, self.module.parameters())):  # frozen: the forward was not DeepSpeed's
            return
        request = " with create_graph=True, as for a gradient penalty," if graph else ""
        raise ContractError(
            f"torch.autograd.grad of an output{request} does not work with sharding.strategy {self._strategy} on "
            "DeepSpeed; set backend: fsdp" + (", sharding: no_shard and precision: fp32" if graph else "")
        )

    def gradients_in_forward(self) -> None:
        """Refuse them at stage 3, which frees parameters in each backward, unless some stay gathered.

        Raises:
            ContractError: Parameters are gathered for each forward and backward.
        """
        if self.forward_is_collective and not self._kept:
            raise ContractError(
                "the forward computes gradients of its own, as by torch.autograd.grad(energy, positions), for which "
                f"DeepSpeed frees parameters with sharding.strategy {self._strategy}; put the forward and the backward "
                "into a block `with engine.weights.unsharded(names):` with the names of all parameters, as of "
                "model.named_parameters() before unishard.prepare, or set sharding: shard_grad_op"
            )

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the `DeepSpeedEngine`, without its division by accumulation steps."""
        self._shown.hide()
        # A new tensor: DeepSpeed's hook on the model's outputs divides an output that is the loss by the accumulation
        # steps, because it runs before the hook that `backward` registers (DeepSpeed 0.19.8, runtime/engine.py,
        # _backward_prologue_per_tensor).
        try:
            self._engine.backward(loss.view(()), scale_wrt_gas=False)
        except AssertionError as error:
            refuse_unused_output(error)
            raise
        for case in self._cases:
            case.after_backward(self._kept)
        self._unused.record_backward()
        self._shown.show(gradients=True)

    def begin(self, *, last: bool) -> None:
        """Show no gradients any more: DeepSpeed learns of the end of a window from `step`."""
        self._shown.hide()

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float | HostRead, bool | None]:
        """Update with `DeepSpeedEngine.step`."""
        with self._shown.hidden():
            self._unused.find()
            self._clipping.prepare(max_norm, divisor)
            with self._window.finished():
                outcome = self._clipping.step()
            self._zero.gather_after()
            skipped = outcome[1] is False
            for case in self._cases if not skipped else ():
                case.updated()
            self._end_window(skipped=skipped)
        return outcome

    def _end_window(self, *, skipped: bool) -> None:
        self._unused.forget()
        for case in self._cases:
            case.end_window(skipped=skipped)

    def gathered_modules(self) -> Iterable[Unit]:
        """At stage 3, all modules with parameters outside leaf modules."""
        return self._entered

    def without_gradient(self) -> Collection[str]:
        """Those that no hook has seen: DeepSpeed takes the gradients away."""
        if not self._unused.is_gap:
            return []
        used = self._unused.used
        return [name for name, parameter in self.shared_parameters.items() if parameter not in used]

    @property
    def gradient_order(self) -> str:
        """At stage 2, where DeepSpeed fills its buckets with gradients in the order in which they come."""
        return self._unused.order

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep parameters gathered at stage 3; at the other stages they are full."""
        self._zero.cases.unsharded.require()
        if not self.forward_is_collective or not names:
            yield
            return
        self._kept = dict.fromkeys(map(self.module.get_parameter, names))
        self._shown.hide()
        try:
            with keep_gathered(self._engine, [*self._kept]):
                self._partitioned()
                yield
        finally:
            self._kept = {}
            self._partitioned()
            self._shown.show()

    def _partitioned(self) -> None:
        for case in self._cases:
            case.partitioned()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A parameter was used that is not gathered, and so empty."""
        return "" if self.forward_is_collective and is_of_shard(error) else None

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=self._master_dtypes,
            master_numel=self._master_numel,
            param_bytes=parameter_bytes(self.module.parameters()),
        )

    def finish_gradients(self) -> None:
        """Reduce what `DeepSpeedEngine.step` would reduce."""
        self._unused.find()
        self._window.reduce()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """The shard in ZeRO's flat gradients."""
        if create:
            self._unused.include(parameter)
        unused = self._unused.unused
        return None if unused and parameter in unused else self._window.shard(parameter)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The shard in ZeRO's flat master weights."""
        return self._zero.master_shard(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Update the parameter in `precision.compute`."""
        self._zero.refresh(parameter, full)
        self._written()

    def _written(self) -> None:
        for case in self._cases:
            case.written()
        self._partitioned()

    def drop_gradients(self) -> None:
        """Drop gradients, also in DeepSpeed's buffers."""
        with self._shown.hidden():
            self._window.drop()
            self._end_window(skipped=False)
            gather([*self._kept])

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside DeepSpeed's."""
        return self._zero.inner.optimizer

    def stepped_memory(self) -> Callable[[], dict[nn.Parameter, SteppedShard]]:
        """Flat master weights, or parts of them.

        Stages 1 and 2 keep only the group that steps in the optimizer, of which a rank's flat master weight may have no
        element of some parameters (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, _optimizer_step).
        """
        masters = self._unused.masters
        nowhere = SteppedShard(next(iter(masters.shards)).new_empty(0))

        def now() -> dict[nn.Parameter, SteppedShard]:
            return {
                each: SteppedShard(*masters.stepped_tensor(each)) if each in masters.masters else nowhere
                for each in self._zero.stepping(masters)
                if each not in masters.unused
            }

        return now

    def reshard_all(self) -> None:
        """Reshard all gathered parameters. Collective.

        Raises:
            CheckpointError: Parameters are offloaded to files.
            BackendError: This DeepSpeed lacks a private name that it needs.
        """
        self._zero.cases.checkpoints.require()
        if self._in_files:
            raise CheckpointError(
                "offload.params: nvme keeps parameters in files, of which DeepSpeed 0.19.8 cannot read or write "
                "shards; set offload.params to cpu to save or load a checkpoint"
            )
        self._zero.reshard_all()
        self._partitioned()

    @torch.no_grad()
    def loaded(self) -> None:
        """Update every copy of the master weights, and let DeepSpeed find the optimizer state. Collective."""
        self.drop_gradients()
        self.weights_written()
        self._zero.link_states(now=True)

    @torch.no_grad()
    def weights_written(self) -> None:
        """Update every copy of the master weights. Collective."""
        self._zero.copy_masters()
        self._written()

    def close(self) -> None:
        """Destroy the `DeepSpeedEngine`, and remove the hooks from the model."""
        self._shown.hide()
        self._unused.remove()
        self._output_hook.remove()
        for hook in self._hooks:
            hook.remove()
        if dist.is_initialized():  # else the script has ended it, and DeepSpeed looks for its rank
            self._engine.destroy()
        forget(self._engine)
        del (
            self._engine,
            self._zero,
            self._clipping,
            self._window,
            self.optimizer_state,
            self._unused,
            self._cases,
        )
