"""Each private name of torch under another one, as a next release might have it: ordinary runs go on, and only its own
case is refused."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest
import torch
from expert_models import build
from harness import MICRO_BATCHES, assert_conforms, configured, curve, own_share, play, refused, train, values, windows
from renaming import renamed
from torch import nn
from torch.nn import functional

import unishard
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import MlpOutput, mlp
from unishard_fsdp.private import PRIVATE_API

PACKAGES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable_state",
    "torch.nn.parallel.distributed",
    "torch._C._distributed_c10d",
)
NO_RENAMING = (
    "TrainingState.POST_BACKWARD",
    "FSDPParam.reduce_dtype",
    "FSDPParam.param_dtype",
    "DTensor._local_tensor",
    "DTensor._op_dispatcher._custom_op_handlers",
    "ops.aten._local_scalar_dense",
)
"""A member of an enum, attributes that torch sets in C++, and an operator cannot be taken away, and
documented arguments of `MixedPrecisionPolicy` have the names of the others."""


def attributes(patch):
    """The last word of each private name."""
    paths = [each.partition(":")[2] for name in patch.names for each in name.split(" or ")]
    return {path.rpartition(".")[2] for path in paths if path not in NO_RENAMING}


@contextmanager
def without(*patches):
    """Within the block, this torch has no private name of these cases."""
    names = set().union(*map(attributes, patches))
    with ExitStack() as stack:
        for name in sorted(names):
            for package in PACKAGES:
                stack.enter_context(renamed(package, name))
        yield


# -- ordinary runs ---------------------------------------------------------------------------------

ORDINARY = (
    ("no_shard", "fp32"),
    ("shard_optimizer", "bf16"),
    ("shard_grad_op", "fp32"),
    ("full_shard", "bf16"),
)


def ordinary():
    """Runs with accumulation and clipping on a torch without any private name."""
    found = {}
    with without(*PRIVATE_API.values()):
        assert not any(patch.works for patch in PRIVATE_API.values() if patch.needed and attributes(patch))
        for cell in ORDINARY:
            with unishard.prepare(mlp(), configured("fsdp", *cell)) as engine:
                found[cell] = curve(train(engine, own_share(MICRO_BATCHES)))
    return found


@pytest.mark.parametrize("cell", ORDINARY, ids="-".join)
def test_an_ordinary_run_needs_no_private_name(cell):
    found = [curves[cell] for curves in values(play(((ordinary, ()),))[ordinary, ()])]
    wanted = oracle.train(mlp(), windows(), configured("fsdp", cell[0], cell[1]), world=2)
    for each in found:
        assert_conforms(each, wanted, TOLERANCES[cell[1]])


# -- the cases -------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Leaves out its second half when told to."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(12, 12)
        self.sometimes = nn.Linear(12, 12)

    def forward(self, x, both):
        return self.always(x) + (self.sometimes(x) if both else 0.0)


class Branching(nn.Module):
    """A unit of which a micro-batch may leave out a part."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.head = nn.Linear(12, 5)

    def forward(self, x, both):
        logits = self.head(self.pair(x, both))
        return MlpOutput(functional.cross_entropy(logits.float(), torch.arange(len(x))), logits)


def branching(strategy, precision="fp32", **sharding):
    return configured("fsdp", {"strategy": strategy, "units": ["Pair"]} | sharding, precision)


def micro_batch(both):
    return {"x": torch.randn(4, 12, generator=torch.Generator().manual_seed(3)), "both": both}


def window(engine, *halves):
    """One accumulation window."""
    for both in halves:
        engine.backward(engine(**micro_batch(both)).loss)
        engine.step()


def late_gradients():
    with unishard.prepare(Branching(), branching("shard_optimizer", "bf16")) as engine:
        window(engine, True, True)  # the ordinary window is none of its business
        return refused(window, engine, False, True)


def hybrid_accumulation():
    with unishard.prepare(mlp(), configured("fsdp", {"strategy": "hybrid_shard", "group_size": 2})) as engine:
        return refused(train, engine, own_share(4))


def conditional_modules():
    return refused(unishard.prepare, Branching(), branching("full_shard", conditional_modules=["Linear"]))


def kept_parameters():
    return refused(
        unishard.prepare, Branching(), branching("full_shard", {"compute": "bf16", "keep_fp32": ["sometimes"]})
    )


def discard():
    with unishard.prepare(mlp(), configured("fsdp", "shard_optimizer")) as engine:
        first, *_ = own_share(1)
        engine.backward(engine(**first).loss)
        engine.step()
        return refused(engine.discard)


def trainable_dtypes():
    with unishard.prepare(Branching(), branching("full_shard", "bf16")) as engine:
        return refused(engine.weights.set_trainable, "pair.sometimes", False)


def ddp_buckets():
    with unishard.prepare(mlp(), configured("fsdp", "no_shard")) as engine:
        return refused(train, engine, own_share(4))


def released():
    engine = unishard.prepare(mlp(), configured("fsdp", "full_shard"))
    said = refused(engine.framework.release)
    engine.close()
    return said


def reads_a_number():
    with unishard.prepare(mlp(), configured("fsdp", "full_shard", "fp32")) as engine:
        float(next(engine.module.parameters()).detach().norm())
        train(engine, own_share(2))
    return "nothing"


def gathers():
    with unishard.prepare(mlp(), configured("fsdp", "full_shard", "fp32")) as engine:
        train(engine, own_share(2))
    return "nothing"


def divides_experts():
    cfg = configured("fsdp", "full_shard").override("parallel.expert=2")
    return refused(unishard.prepare, build("own"), cfg)


def keeps_files():
    offload = {"params": "nvme", "optimizer": "nvme", "nvme_path": "."}
    return refused(unishard.prepare, mlp(), configured("fsdp", "full_shard", offload=offload))


SCENARIOS = {
    "shard-memory": keeps_files,
    "slices": divides_experts,
    "pending-gathers": gathers,
    "local-tensors": reads_a_number,
    "numbers": reads_a_number,
    "released-modules": released,
    "mixed-accumulation": late_gradients,
    "hybrid-accumulation": hybrid_accumulation,
    "conditional-modules": conditional_modules,
    "kept-parameters": kept_parameters,
    "discard": discard,
    "trainable-dtypes": trainable_dtypes,
    "ddp-buckets": ddp_buckets,
}
"""A run that meets each case."""

GO_ON = ("hybrid-accumulation", "ddp-buckets", "local-tensors", "numbers", "pending-gathers")
"""Cases that are done in another way where a name is gone."""


def scenario(name):
    """What a run that meets a case is told without the private names of that case; other tests have them."""
    with without(PRIVATE_API[name]):
        return SCENARIOS[name]()


CASES = tuple((scenario, (name,)) for name in SCENARIOS)


def told(name):
    on_four = name == "hybrid-accumulation"
    cases = tuple(case for case in CASES if (case[1][0] == "hybrid-accumulation") is on_four)
    return values(play(cases, 4 if on_four else 2)[scenario, (name,)])


def test_every_case_has_a_run_that_meets_it():
    assert set(SCENARIOS) == set(PRIVATE_API)


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - set(GO_ON)))
def test_a_case_whose_private_names_are_gone_is_refused_in_one_sentence(name):
    patch = PRIVATE_API[name]
    if not patch.needed:
        assert told(name) == ["nothing"] * len(told(name)), f"{patch.package} does it itself from {patch.until} on"
        return
    for message in told(name):
        kind, _, text = message.partition(": ")
        assert kind == "BackendError"
        assert patch.case.rstrip(",") in text
        assert f"torch {torch.__version__.partition('+')[0]} does not have" in text
        assert text.endswith(patch.instead)


@pytest.mark.parametrize("name", GO_ON)
def test_a_case_that_has_another_way_takes_it(name):
    assert told(name) == ["nothing"] * len(told(name))


def test_the_core_says_what_it_cannot_do(monkeypatch):
    """Names of torch's C++ half; they are taken away, not renamed."""
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    assert not CORE_PRIVATE_API["foreign-backward"].works
    assert "needs _will_engine_execute_node of torch" in CORE_PRIVATE_API["foreign-backward"].refusal()
    assert CORE_PRIVATE_API["checkpoint-index"].works
