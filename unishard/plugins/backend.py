"""The two protocols between the core and an engine. A third engine's author implements these and runs `unishard.testing`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.mapping.entries import Entry, Key
from unishard.mapping.express import Expressed
from unishard.mapping.report import Translation
from unishard.mapping.rules import Rule
from unishard.patches import Patch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unishard.checkpoint.formats import CheckpointFormat
    from unishard.engine.model.units import Unit

__all__ = ["Backend", "Engine", "OptimizerBuilder", "OptimizerFactory", "Placement", "Resumed", "Step"]

OptimizerFactory = Callable[[Iterable[Any]], Any]
"""Builds a `torch.optim.Optimizer` from the trainable parameters that the engine hands it."""

OptimizerBuilder = Callable[[Iterable[tuple[str, Any]]], Any]
"""What a backend is given: builds a `torch.optim.Optimizer` from pairs of name and trainable parameter, all of them, as
`model.named_parameters()` yields them; the names are those of the model before it was sharded."""


class Step(NamedTuple):
    """What one call of `Engine.step` did."""

    updated: bool
    """Whether the parameters moved: true at the end of an accumulation window, unless the step was skipped."""
    grad_norm: float | None
    """Global L2 norm of the averaged gradients before clipping, in fp32; None inside a window, infinite if a gradient is not finite."""
    lr: float
    """Learning rate of the first parameter group: the one this update used; inside a window the one it will use."""
    skipped: bool
    """Whether an update was due but left out, because a gradient was infinite or not a number."""


class Placement(NamedTuple):
    """What an engine really holds after `prepare`, read off its live tensors, on this rank."""

    engine: str
    """Class that runs the model, such as `DeepSpeedEngine`."""
    units: tuple[str, ...]
    """Names of the modules whose parameters are gathered together, the root not among them; empty where the engine has no units."""
    master_dtypes: frozenset[str]
    """Formats of the weights that the optimizer updates, such as `{"float32"}`."""
    master_numel: int
    """Elements of trainable master weight on this rank, padding included."""
    param_bytes: int
    """Bytes of the model's parameters on this rank between steps."""


class Resumed(NamedTuple):
    """Where a run goes on after `Engine.load`."""

    path: Path
    """The checkpoint."""
    step: int
    """Accumulation windows that had ended when it was saved, skipped ones too."""
    epoch: int
    """Epoch of the training data in which it goes on, counted from 0."""
    state: Any
    """What the user saved along with it; None for nothing."""
    notes: tuple[str, ...]
    """What is not as it was: what did not fit, what the config says otherwise, what could not be continued."""


class Engine(Protocol):
    """A prepared model and its optimizer. Every method but the properties is collective: call it on all ranks."""

    @property
    def module(self) -> nn.Module:
        """The model, sharded in place; the names of its modules and parameters are the user's."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def optimizer(self) -> Any:
        """The optimizer that steps; its `param_groups` hold the live learning rates."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate that the next update will use (first parameter group)."""
        ...

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward, and the gradients divided by after it; 1.0 but in fp16."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
        ...

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None) -> None:
        """Backward of one micro-batch. `loss` is its mean loss (a scalar), never scaled by the caller, or a sum over `num_items`."""
        ...

    def step(self, clip_grad_norm: float | None = ...) -> Step:
        """After every micro-batch; updates the parameters at the end of an accumulation window."""
        ...

    def discard(self) -> None:
        """Drop the accumulation window, as if its backward calls had not been."""
        ...

    def grad(self, name: str) -> Tensor | None:
        """The gradient that the coming update will use: whole, fp32, averaged, before clipping. At the end of a window."""
        ...

    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace it; norm and clipping see the new one."""
        ...

    def grad_norms(self) -> dict[str, float]:
        """Norm of each gradient by name."""
        ...

    def parameter(self, name: str) -> Tensor:
        """A copy of a master weight: whole, fp32."""
        ...

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace it, and every copy that the engine computes with."""
        ...

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Whole master weights by name, which are written back on leaving."""
        ...

    def parameter_norms(self) -> dict[str, float]:
        """Norm of each master weight by name."""
        ...

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or let those train that were trainable in `prepare`, from the next accumulation window on."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Forwards inside pass gradients on to their inputs and leave none on this model's parameters."""
        ...

    def train(self, mode: bool = True) -> Engine:
        """Put the model in training mode."""
        ...

    def eval(self) -> Engine:
        """Put the model in evaluation mode."""
        ...

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Iterable[Any]:
        """This rank's batches, moved to the device, grouped into accumulation windows."""
        ...

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None = None, progress: bool = False) -> Iterable[Sequence[Any]]:
        """This rank's batches in accumulation windows, one for each update."""
        ...

    def mean(self, value: Tensor | float) -> float:
        """Mean of a scalar over the ranks."""
        ...

    def follow(self, scheduler: Any) -> None:
        """Let a torch scheduler write the learning rates, once for each real update. `prepare` calls it, before the first step."""
        ...

    def identify(self, model: str, groups: Sequence[Sequence[str]]) -> None:
        """Say what sharding hides: the model's class, and the parameters in each group of `optimizer`. `prepare` calls it."""
        ...

    def save(self, root: str | Path | None = None, *, state: Any = None) -> Path:
        """Save the run in a directory of checkpoints, for any engine, strategy and number of ranks."""
        ...

    def load(
        self, source: str | Path = "latest", *, strict: bool = True, verify: Literal["files", "bits"] | None = "files", data: bool = True
    ) -> Resumed | None:
        """Go on from a checkpoint, of whatever engine, strategy and number of ranks."""
        ...

    def export(self, folder: str | Path, *, dtype: str | None = None, max_shard_size: int | str = "5GB", tokenizer: Any = None) -> Path:
        """Write the weights as Hugging Face lays them out."""
        ...

    def on_save(self, state: Callable[[], Any]) -> None:
        """Say what a save that the config asks for takes along."""
        ...

    def wait(self) -> None:
        """Wait until a save in the background is complete."""
        ...

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, without a graph."""
        ...

    def lockstep(self) -> AbstractContextManager[None]:
        """A block in evaluation mode in which ranks may make different numbers of forwards, or of `generate`."""
        ...

    def gather_for_metrics(self, data: Any, *, pad: float | None = None) -> Any:
        """What all ranks computed for a batch, in the order of the dataset, without the samples that fill up."""
        ...

    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        ...

    def close(self) -> None:
        """Release the engine. Calling it twice is fine; using the engine afterwards is an error."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """An engine's translator and builder. Stateless; importing it needs neither torch nor the engine."""

    @property
    def name(self) -> str:
        """The word in `backend:`."""
        ...

    @property
    def requires(self) -> Mapping[str, str]:
        """Import name of each package that `prepare` needs, to the extra that brings it: `{"deepspeed": "deepspeed"}`."""
        ...

    @property
    def tested(self) -> Mapping[str, Sequence[str]]:
        """Versions that were tested, oldest first, by the name of each package that decides how it trains: `{"torch": ("2.11", "2.12")}`.

        A version counts as tested if it begins with one of them, number by number: 2.11.1 with 2.11.
        """
        ...

    @property
    def patches(self) -> Mapping[str, Patch]:
        """The private names of the engine that rare cases need, by the short name of the case. Imports no engine."""
        ...

    @property
    def rules(self) -> Mapping[str, Rule]:
        """One row for each leaf of `Config`, in its order."""
        ...

    @property
    def constants(self) -> Mapping[str, tuple[Any, str]]:
        """Dotted native keys that are written whatever the config says: `(value, why)`."""
        ...

    def translate(self, cfg: Config, topology: Topology) -> Translation:
        """The native config and the report. Pure.

        Raises:
            ConfigError: `native.<name>` holds a key that the engine does not know, or one that a field decides.
        """
        ...

    @property
    def keys(self) -> Mapping[str, Key]:
        """The engine's own arguments, dotted, and what each says in the config's words."""
        ...

    @property
    def expressions(self) -> Mapping[str, Rule]:
        """How a training script without unishard hands each field to the engine: one row for each leaf of `Config`, in its order."""
        ...

    def parse(
        self, native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None
    ) -> list[Entry]:
        """What the engine's own arguments say, one entry for each; the inverse of `arguments`. Pure.

        Args:
            native: What a training script without unishard hands to the engine, as nested mappings.
            defaults: What a tool around the engine assumes where `native` is silent, by dotted key; the engine's own defaults count
                for the rest.
            topology: The ranks, where they are known.
        """
        ...

    def arguments(self, cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> Expressed:
        """What a training script without unishard hands to the engine for the same training. Pure.

        Args:
            cfg: What to run; `native.<name>` is merged last.
            topology: The ranks.
            undecided: Fields that the training script decides; their value in `cfg` only fills their place.
        """
        ...

    @property
    def checkpoint_formats(self) -> Mapping[str, CheckpointFormat]:
        """Checkpoint directories of the engine's own, by the word after `--from` and `--to` of `unishard checkpoint convert`."""
        ...

    def prepare(
        self,
        model: nn.Module,
        cfg: Config,
        translation: Translation,
        topology: Topology,
        units: Sequence[Unit],
        optimizer: OptimizerBuilder | None,
    ) -> Engine:
        """Shard the model and build its engine. Imports the engine. Collective.

        Args:
            model: Whole, on any device, trainable parameters in `precision.master`; they may differ between ranks (rank 0's count).
                They may be on the meta device, on rank 0 too: `unishard.engine.model.materialization` gives them their data.
            cfg: What to run.
            translation: What `translate` made of it; its native config is what runs.
            topology: The ranks. The process group is up.
            units: Modules whose parameters are to be gathered together.
            optimizer: Builds the optimizer from the named trainable parameters. None for an engine that only evaluates, which is asked
                for where the strategy shards parameters: an `UntrainedEngine`, its parameters frozen and in the compute format.
        """
        ...
