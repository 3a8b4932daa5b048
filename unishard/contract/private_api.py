"""Private names of an engine that a rare case needs, each with a probe that says whether the installed version still
has them.

An ordinary run uses only public names. A case that needs private names is a `PrivateApi`: it is installed only for runs
that can meet the case, and if its probe fails, only that case is refused. `unishard doctor` runs every probe. Imports
no engine until a probe runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from unishard.contract.installed import version_of
from unishard.errors import BackendError


@dataclass(frozen=True, slots=True)
class PrivateApi:
    """One case that needs private names of an engine."""

    name: str
    """Short name, such as `ddp-buckets`."""
    case: str
    """The case, as the start of a sentence: `DistributedDataParallel on more than two ranks`."""
    names: tuple[str, ...]
    """The private names, as `module:Class.attribute` or `module:function`; ` or ` separates alternatives.

    An attribute may be one that the class sets on itself.
    """
    versions: str
    """Versions on which the case was run."""
    link: str
    """Upstream source, issue or documentation that shows why it is needed."""
    instead: str
    """What to do if a name is missing, as an imperative."""
    until: str = ""
    """First version of the package that does not need the patch; empty for none."""

    @property
    def package(self) -> str:
        """Distribution that the names belong to."""
        return self.names[0].partition(":")[0].partition(".")[0]

    @property
    def needed(self) -> bool:
        """Whether the installed version needs the patch."""
        return not self.until or _numbers(version_of(self.package)) < _numbers(self.until)

    def missing(self) -> tuple[str, ...]:
        """The needed names that the installed version does not have. Imports the engine."""
        return _absent(self.names) if self.needed else ()

    @property
    def works(self) -> bool:
        """Whether the case can be run: the installed version has every name, or does not need the patch.

        Imports the engine.
        """
        return not self.missing()

    def refusal(self) -> str:
        """Why the case cannot be run, and what to do instead, in one sentence."""
        absent = ", ".join(
            " or ".join(each.partition(":")[2] for each in name.split(" or ")) for name in self.missing()
        )
        return (
            f"{self.case} needs {absent} of {self.package}, which {self.package} {version_of(self.package)} does not "
            f"have (it was run on {self.versions}); {self.instead}"
        )

    def require(self) -> None:
        """Check that the case can be run.

        Raises:
            BackendError: A name is missing.
        """
        if not self.works:
            raise BackendError(self.refusal())


def by_name(*cases: PrivateApi) -> Mapping[str, PrivateApi]:
    """Patches by their short name, in the order given."""
    return {case.name: case for case in cases}


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


@cache
def _absent(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(map(_exists, name.split(" or "))))


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        target: Any = import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        if not hasattr(target, part):
            return isinstance(target, type) and part in _assigned(
                target.__mro__
            )  # an attribute of its instances ends the path
        target = getattr(target, part)
    return True


@cache
def _assigned(bases: tuple[Any, ...]) -> frozenset[str]:
    """Names that a class and its bases annotate, or use as attributes in their methods."""
    return frozenset(
        name
        for base in bases
        for name in (*inspect.get_annotations(base), *(name for code in _codes(base) for name in code.co_names))
    )


def _codes(owner: type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(function, FunctionType):
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


_TORCH = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch"

CORE_PRIVATE_API = by_name(
    PrivateApi(
        name="foreign-backward",
        case="A backward that is not the engine's, through an output of its forward,",
        names=("torch._C:_will_engine_execute_node",),
        versions="torch 2.11 to 2.15",
        link=f"{_TORCH}/autograd/graph.py#L664",
        instead="call engine.backward(loss), or compute and backward the loss inside `with engine.weights.frozen():`",
    ),
    PrivateApi(
        name="group-timeout",
        case="The timeout of a process group that the script has started",
        names=("torch.distributed:ProcessGroup._get_backend", "torch._C._distributed_c10d:Backend.Options._timeout"),
        versions="torch 2.11 to 2.15",
        link=f"{_TORCH}/distributed/distributed_c10d.py#L1616",
        instead="set communication.timeout",
    ),
    PrivateApi(
        name="checkpoint-index",
        case="The index of a checkpoint",
        names=(
            "torch.distributed.checkpoint.filesystem:_StorageInfo",
            "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
        ),
        versions="torch 2.11 to 2.15",
        link=f"{_TORCH}/distributed/checkpoint/filesystem.py#L75",
        instead="train without checkpoints, or save and load with one of these versions",
    ),
    PrivateApi(
        name="buffers-in-files",
        case="A checkpoint or an export of a model that has buffers, and its evaluation on several ranks,",
        names=("torch.nn:Module._non_persistent_buffers_set",),
        versions="torch 2.11 to 2.15",
        link=f"{_TORCH}/nn/modules/module.py#L2162",
        instead="set training.buffers to local and train without checkpoints and exports, or use one of these versions",
    ),
    PrivateApi(
        name="models-without-data",
        case="unishard plan",
        names=(
            "torch._subclasses.fake_tensor:FakeTensorMode",
            "torch.utils._python_dispatch:TorchDispatchMode",
            "torch.utils._pytree:tree_leaves",
            "torch:UntypedStorage._cdata",
        ),
        versions="torch 2.13",
        link=f"{_TORCH}/_subclasses/fake_tensor.py#L1",
        instead="plan with one of these versions",
    ),
    PrivateApi(
        name="changed-in-place",
        case="activation_checkpointing: selective",
        names=(
            "torch._ops:OpOverload._schema",
            "torch.utils._python_dispatch:TorchDispatchMode",
            "torch:UntypedStorage._cdata",
        ),
        versions="torch 2.13",
        link=f"{_TORCH}/_ops.py#L806",
        instead="set activation_checkpointing to full",
    ),
    PrivateApi(
        name="logits-in-chunks",
        case="training.loss_chunk_tokens",
        names=(
            "torch:Tensor._make_wrapper_subclass",
            "torch._C:DisableTorchFunctionSubclass",
        ),
        versions="torch 2.13",
        link=f"{_TORCH}/_tensor.py#L1",
        instead="leave it out, or use one of these versions; unishard.chunked_loss needs none of them",
    ),
    PrivateApi(
        name="export-conversions",
        case="An export of a model whose weights transformers converts",
        names=("torch:Tensor._version", "torch:UntypedStorage._cdata"),
        versions="torch 2.13 and 2.15",
        link=f"{_TORCH}/storage.py#L42",
        instead="export with one of these versions",
    ),
    PrivateApi(
        name="views",
        case="A view of a gathered weight that a module keeps",
        names=("torch:Tensor._base", "torch._C:DisableTorchFunctionSubclass"),
        versions="torch 2.13",
        link=f"{_TORCH}/_tensor.py#L1",
        instead="keep a clone of it",
    ),
    PrivateApi(
        name="skip-on-device",
        case="An update that is skipped on the device, without the host knowing at once,",
        names=("torch.optim:Optimizer._optimizer_step_pre_hooks", "torch.optim:Optimizer._optimizer_step_post_hooks"),
        versions="torch 2.13",
        link=f"{_TORCH}/optim/adam.py#L267",
        instead="nothing to do: the host waits for the gradient norm in each update",
    ),
    PrivateApi(
        name="abort-all-groups",
        case="The end of a run over NCCL after an error",
        names=("torch.distributed.distributed_c10d:_abort_process_group",),
        versions="none yet, for want of NCCL; torch 2.11 to 2.15 have the name",
        link=f"{_TORCH}/distributed/distributed_c10d.py#L2460",
        instead="nothing to do: only the default group is aborted",
    ),
    PrivateApi(
        name="memory-snapshot",
        case="A snapshot of CUDA memory (`profile.memory`)",
        names=("torch.cuda.memory:_record_memory_history", "torch.cuda.memory:_dump_snapshot"),
        versions="torch 2.11; 2.12 to 2.15 have the names",
        link=f"{_TORCH}/cuda/memory.py#L892",
        instead="set profile.memory to false, or use one of these versions",
    ),
)
"""Private names that unishard itself needs on every engine."""
