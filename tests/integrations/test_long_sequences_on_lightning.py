"""Lightning's Trainer and Fabric where ranks share samples: losses, norms and weights are those of plain torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, in_ranks, refused

from unishard.testing.cells import BACKENDS

if find_spec("lightning") is None or find_spec("transformers") is None:
    pytest.skip("pip install 'unishard[lightning,trainer]'", allow_module_level=True)

import fabric_programs
import lightning
import lightning_programs as programs
from hybrid_models import hybrid
from lightning.pytorch.callbacks import ModelCheckpoint
from sequence_programs import ROWS, UPDATES, WINDOW, collate, equal, model, plain, samples, summed
from test_on_accelerate import shared_folder

from unishard.integrations.lightning import weights_of

SHARED = {"parallel": {"sequence": 2}}
EPOCH = 8
"""Samples of an epoch of two updates, where one group reads."""
BY_EPOCH = {"on_step": False, "on_epoch": True}
VALIDATED = 7


def loader(count=48, shuffle=False):
    return torch.utils.data.DataLoader(samples(count), batch_size=ROWS, collate_fn=collate, shuffle=shuffle)


def shares(data, readers, *, shuffle, epoch=0):
    """What each reader reads, by Lightning's sampler."""
    found = []
    for rank in range(readers):
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=readers, rank=rank, shuffle=shuffle)
        sampler.set_epoch(epoch)
        indices = [*sampler]
        found.append([indices[first : first + ROWS] for first in range(0, len(indices), ROWS)])
    return found


def read_in_order(readers, count=48, *, epochs=1, shuffle=True):
    """The samples as Lightning's sampler orders them: a batch of each reader in turn."""
    data = samples(count)
    turns = [
        turn
        for epoch in range(epochs)
        for turn in zip(*shares(data, readers, shuffle=shuffle, epoch=epoch), strict=True)
    ]
    return [data[index] for turn in turns for batch in turn for index in batch]


def summary(values):
    """The mean of each window."""
    return [sum(values[first : first + WINDOW]) / WINDOW for first in range(0, len(values), WINDOW)]


class Language(lightning.LightningModule):
    """A model of transformers, of which each step uses the loss."""

    def __init__(self):
        super().__init__()
        self.model = model()
        self.losses, self.norms = [], []

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        self.log("tokens", float(batch["attention_mask"].sum()), reduce_fx="sum", sync_dist=True, **BY_EPOCH)
        return loss

    def loss(self, batch):
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(self.trainer.strategy.engine.gradients.norm().item())

    def validation_step(self, batch, index):
        self.log("val", self.model(**batch).loss, sync_dist=True, batch_size=len(batch["input_ids"]))

    def predict_step(self, batch, index):
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByItself(Language):
    """Calls itself, around a hybrid model, with a whole batch."""

    def __init__(self):
        super().__init__()
        self.model = hybrid("Bamba", vocab_size=48)

    def forward(self, batch):
        return self.model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])

    def loss(self, batch):
        return self(batch).loss


class OfLogits(Language):
    """Computes the loss itself."""

    def loss(self, batch):
        loss, items = summed(self.model, batch)
        return loss / items


class Manual(Language):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer, last = self.optimizers(), index % WINDOW == WINDOW - 1
        with optimizer.toggle_model(sync_grad=last):
            loss = self.loss(batch)
            self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
            self.manual_backward(loss / WINDOW)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def trainer(backend, options=SHARED, **given):
    own = {"max_steps": UPDATES, "max_epochs": -1, "accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.5}
    return programs.trainer(programs.strategy(backend, **options), **own | given)


def trained(backend, readers, kind=Language, options=SHARED, **given):
    run, module = trainer(backend, options, **given), kind()
    losses, norms, weights, _ = plain(readers, mean="batch", data=read_in_order(readers), made=kind().model)
    run.fit(module, loader())
    state = {name.removeprefix("model."): value for name, value in run.strategy.engine.weights.state_dict().items()}
    found = {"losses": summary(module.losses), "norms": module.norms}
    run.strategy.engine.close()
    equal(found, {"losses": losses, "norms": norms}, weights, state)
    assert run.global_step == UPDATES
    return run


class Scheduled(Language):
    """With a schedule of its own, of one group."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]


@in_ranks(
    cells=(
        ("fsdp", Language, "sequence"),
        ("deepspeed", ByItself, "sequence"),
        ("fsdp", OfLogits, "sequence"),
        ("deepspeed", Scheduled, "tensor"),
        *((("deepspeed", Language, "sequence"), ("fsdp", OfLogits, "tensor")) if DEEP else ()),
    )
)
def test_the_trainer_trains_as_one_process(backend, kind, shared):
    trained(backend, 1, kind, options={"parallel": {shared: 2}})


@in_ranks(world=4, cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_the_trainer_beside_data_parallelism(backend):
    trained(backend, 2)


@in_ranks(cells=tuple((backend,) for backend in (BACKENDS if DEEP else BACKENDS[:1])))
def test_the_trainer_trains_in_bf16(backend):
    losses, norms, *_ = plain(1, mean="batch", data=read_in_order(1))
    run, module = trainer(backend, SHARED | {"precision": "bf16"}, precision="bf16-mixed"), Language()
    run.fit(module, loader())
    dtypes = {value.dtype for value in run.strategy.engine.weights.state_dict().values()}
    run.strategy.engine.close()
    assert summary(module.losses) == pytest.approx(losses, rel=5e-3)
    assert module.norms == pytest.approx(norms, rel=2e-2)
    assert dtypes <= {torch.float32}


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_manual_optimization(backend):
    trained(backend, 1, Manual, accumulate_grad_batches=1, gradient_clip_val=None)


def validated(made, readers):
    """The mean loss of the validation samples, as each reader sees them."""
    data, total, number = samples(VALIDATED), 0.0, 0
    for batches in shares(data, readers, shuffle=False):
        for batch in batches:
            loss, items = summed(made, collate([data[index] for index in batch]))
            total, number = total + len(batch) * (loss / items).item(), number + len(batch)
    return total / number


@in_ranks(world=4, cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_validation_and_logs_count_groups(backend):
    run, module = trainer(backend, max_epochs=1, max_steps=-1, num_sanity_val_steps=2), Language()
    run.fit(module, loader(2 * EPOCH), loader(VALIDATED))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    *_, made = plain(2, mean="batch", data=read_in_order(2, 2 * EPOCH), updates=2)
    made.eval()
    with torch.no_grad():
        expected = validated(made, 2)
    run.strategy.engine.close()
    assert metrics["val"] == pytest.approx(expected, rel=1e-6)
    assert metrics["tokens"] == sum(len(row["input_ids"]) for row in samples(2 * EPOCH))


@in_ranks(cells=(BACKENDS[::-1], BACKENDS)[: 1 + DEEP])
def test_epochs_and_a_resume_on_the_other_engine(backend, other):
    data = read_in_order(1, EPOCH, epochs=3)
    losses, norms, weights, made = plain(1, mean="batch", data=data, updates=6)
    folder = f"{shared_folder()}/kept"
    keeps = ModelCheckpoint(folder, save_last=True, save_top_k=0)
    first = trainer(backend, max_epochs=2, max_steps=-1, callbacks=[keeps], enable_checkpointing=True)
    begun = Language()
    first.fit(begun, loader(EPOCH))
    first.strategy.engine.close()
    second = trainer(other, {"parallel": {"sequence": {"size": 2, "method": "allgather"}}}, max_epochs=3, max_steps=-1)
    module = Language()
    second.fit(module, loader(EPOCH), ckpt_path=f"{folder}/last.ckpt")
    predicted = torch.cat(second.predict(module, loader(VALIDATED)))
    state = {name.removeprefix("model."): value for name, value in second.strategy.engine.weights.state_dict().items()}
    second.strategy.engine.close()
    found = {"losses": summary(begun.losses + module.losses), "norms": begun.norms + module.norms}
    equal(found, {"losses": losses, "norms": norms}, weights, state)
    assert second.global_step == 6
    made.eval()
    batch = collate(samples(VALIDATED))
    with torch.no_grad():
        logits = made(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(predicted[kept], logits[kept], rtol=0, atol=1e-5)
    alone = trainer(other, {}, max_epochs=3, max_steps=-1)
    third = Language()
    third.load_state_dict(weights_of(f"{folder}/last.ckpt"))
    alone.fit(third, loader(EPOCH), ckpt_path=f"{folder}/last.ckpt")
    alone.strategy.engine.close()
    assert alone.global_step == 5  # two readers of two batches each


class Generates(Language):
    """Whose steps generate."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def generated(self):
        tokens = self.model.generate(PROMPT[: 1 + self.global_rank], max_new_tokens=3 + self.global_rank)
        self.seen.append((tokens, {name: value.clone() for name, value in whole_weights(self).items()}))

    def training_step(self, batch, index):
        self.generated()
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.generated()
        super().validation_step(batch, index)


PROMPT = torch.arange(3, 13).view(2, 5)


def whole_weights(module):
    state = module.trainer.strategy.engine.weights.state_dict(all_ranks=True)
    return {name.removeprefix("model."): value for name, value in state.items()}


@in_ranks(cells=(("fsdp", "full_shard"), ("deepspeed", "no_shard")))
def test_steps_generate_of_whole_samples(backend, strategy):
    options = SHARED | {"sharding": strategy}
    run, module = trainer(backend, options, max_steps=2, accumulate_grad_batches=1), Generates()
    run.fit(module, loader(), loader(2))
    rank = module.global_rank
    run.strategy.engine.close()
    for tokens, weights in module.seen:
        alone = model().eval()
        alone.load_state_dict(weights)
        assert tokens.tolist() == alone.generate(PROMPT[: 1 + rank], max_new_tokens=3 + rank).tolist()
    assert len(module.seen) == 3


class Beside(Language):
    """Has parameters that no model has."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(1))


class OtherSamples(Language):
    """Whose ranks read different samples."""

    def training_step(self, batch, index):
        return self.loss(collate(samples(ROWS + self.global_rank)[-ROWS:]))


@in_ranks(cells=(("fsdp",),))
def test_what_is_refused(backend):
    beside = refused(lambda: trainer(backend).fit(Beside(), loader()))
    size = refused(lambda: trainer(backend, {"parallel": {"sequence": 4}}).fit(Language(), loader()))
    other = refused(lambda: trainer(backend).fit(OtherSamples(), loader()))
    prompts = refused(lambda: trainer(backend, {"parallel": {"tensor": 2}}).fit(Generates(), loader()))
    assert "splits the samples of one model, but Beside has parameters in model, head, its own attributes" in beside
    assert "is 4, which does not divide 2 ranks" in size
    assert "have read different ones" in other
    assert "(parallel.tensor.size is 2), but have read different ones" in prompts


class InFabric(lightning.LightningModule):
    """Of which Fabric calls the step."""

    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, batch):
        return self.model(**batch).loss


def looped(backend, made, step):
    """Losses, norms and weights of a loop of Fabric."""
    fabric = fabric_programs.begun(backend, **SHARED)
    made, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    losses, norms = [], []
    for index, batch in enumerate(fabric.setup_dataloaders(loader())):
        last = index % WINDOW == WINDOW - 1
        with fabric.no_backward_sync(made, enabled=not last):
            loss = step(made, batch)
            fabric.backward(loss / WINDOW)
        losses.append(fabric.all_reduce(loss.detach().clone()).item())
        if last:
            norms.append(fabric.clip_gradients(made, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        if len(norms) == UPDATES:
            break
    engine = fabric.strategy.engine_of(optimizer)
    return {"losses": summary(losses), "norms": norms}, engine.weights.state_dict(), fabric, made, engine


def compare(found, state, readers, prefix=""):
    losses, norms, weights, made = plain(readers, mean="batch", data=read_in_order(readers, shuffle=False))
    state = {name.removeprefix(prefix): value for name, value in state.items()}
    equal(found, {"losses": losses, "norms": norms}, weights, state)
    return made


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_the_step_of_a_module_in_fabric(backend):
    found, state, *_, engine = looped(backend, InFabric(), lambda made, batch: made.training_step(batch))
    engine.close()
    compare(found, state, 1, "model.")


@in_ranks(world=4, cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_a_loop_of_fabric(backend):
    found, state, fabric, made, engine = looped(backend, model(), lambda made, batch: made(**batch).loss)
    made.eval()
    reference = compare(found, state, 2).eval()
    alone = fabric.setup(reference)
    batch = {"input_ids": collate(samples(2))["input_ids"]}
    with torch.no_grad():
        logits, of_other = made(**batch).logits, alone(**batch).logits
    engine.close()
    whole = plain(2, mean="batch", data=read_in_order(2, shuffle=False))[3]
    expected = whole.eval()(**batch).logits.detach()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_other, expected, rtol=0, atol=1e-5)
