"""Programs of Lightning that tests run plain and on engines, on ranks."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from forking import completed
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from unishard.integrations.lightning import UnishardStrategy, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
VALIDATED = 8


def data(count=36):
    generator = torch.Generator().manual_seed(0)
    return [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(count, 4, generator=generator)]


def loader(count=36):
    """36 samples in batches of 2 on 2 ranks: 9 each, so that the last window of 2 has one batch."""
    return DataLoader(data()[:count], batch_size=2)


class Regression(lightning.LightningModule):
    """Calls itself and uses a parameter of its own in its steps, which take no index."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.losses, self.norms = [], []

    def forward(self, x):
        return self.net(x) * self.scale

    def loss(self, batch):
        return (self(batch["x"]) - batch["y"]).square().mean()

    def seen(self, loss):
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())

    def norm(self):
        engine = getattr(self.trainer.strategy, "engine", None)
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append((engine.gradients.norm() if engine else torch.nn.utils.get_total_norm(grads)).item())

    def training_step(self, batch):
        loss = self.loss(batch) + 0.1 * self.scale.square().sum()
        self.seen(loss)
        self.log("train_loss", loss)
        return {"loss": loss, "more": batch["y"]}

    def on_before_optimizer_step(self, optimizer):
        if self.automatic_optimization:
            self.norm()

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True, on_epoch=True)

    def test_step(self, batch, index):
        self.log("test", self.loss(batch), sync_dist=True, on_epoch=True)

    def predict_step(self, batch):
        return self(batch["x"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Manual(Regression):
    """Its backward is inside its step, which calls its modules one by one, and accumulates by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.heads = torch.nn.ModuleList([torch.nn.Linear(16, 1)])
        self.net = self.net[:2]
        self.scale.requires_grad_(False)

    def forward(self, x):
        return self.heads[0](self.net(x)) * self.scale

    def training_step(self, batch, index):
        optimizer, last = self.optimizers(), index % 2 == 1 or index == 8
        with optimizer.toggle_model(sync_grad=last):
            hidden = self.net(batch["x"])
            loss = (self.heads[0](hidden) - batch["y"]).square().mean()
            self.seen(loss)
            self.manual_backward(loss / 2)
        if last:
            self.norm()
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def strategy(backend, sharding="full_shard", **sections):
    """A strategy of unishard; Lightning's own for the backend `plain`."""
    if backend == "plain":
        return "ddp"
    return UnishardStrategy({"backend": backend, "sharding": sharding, **sections})


def trainer(given, **options):
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("WORLD_SIZE", os.environ["LOCAL_WORLD_SIZE"])  # Lightning's teardown removes it
    warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
    lightning.seed_everything(0, verbose=False)
    own = {"devices": int(os.environ["WORLD_SIZE"]), "accelerator": "cpu", "max_epochs": 2, **QUIET}
    own |= {"enable_checkpointing": False, "num_sanity_val_steps": 1}
    return lightning.Trainer(strategy=given, **own | options)


def automatic(backend, sharding):
    run = trainer(strategy(backend, sharding), accumulate_grad_batches=2, gradient_clip_val=1.0)
    module = Regression()
    before = run.test(module, loader(VALIDATED), verbose=False)[0]["test"]
    run.fit(module, loader(), loader(VALIDATED))
    found = figures(run, module)
    found["test"] = [before, run.test(module, loader(VALIDATED), verbose=False)[0]["test"]]
    found["predicted"] = torch.cat(run.predict(module, loader(VALIDATED))).flatten().tolist()
    return found


def in_precision(backend, precision):
    """Automatic optimization in another precision."""
    run = trainer(strategy(backend, precision=precision), accumulate_grad_batches=2, gradient_clip_val=1.0)
    module = Regression()
    run.fit(module, loader(), loader(VALIDATED))
    return figures(run, module)


def manual(backend, sharding):
    run, module = trainer(strategy(backend, sharding)), Manual()
    run.fit(module, loader(), loader(VALIDATED))
    return figures(run, module)


def figures(run, module):
    val, lr = run.callback_metrics["val"].item(), run.optimizers[0].param_groups[0]["lr"]
    return {"losses": module.losses, "norms": module.norms, "val": [val], "lr": [lr], "steps": [run.global_step]}


def both(backend, sharding):
    return {"automatic": automatic(backend, sharding), "manual": manual(backend, sharding)}


def checkpointed(backend, sharding, folder, epochs, resume=None):
    """Training with the best two checkpoints and the last one; its figures, and the files."""
    keeps = ModelCheckpoint(folder, monitor="val", save_last=True, save_top_k=2, filename="{epoch}")
    run, module = trainer(strategy(backend, sharding), max_epochs=epochs, callbacks=[keeps], enable_checkpointing=True,
                          accumulate_grad_batches=2), Regression()  # fmt: skip
    run.fit(module, loader(), loader(VALIDATED), ckpt_path=resume)
    return figures(run, module) | {"best": keeps.best_model_path}


def read(path, native):
    """What a checkpoint gives a module that was never fitted; and what `fit` says of Lightning's own file."""
    run = trainer(strategy("fsdp"))
    validated = run.validate(Regression(), loader(VALIDATED), ckpt_path=path, verbose=False)[0]["val"]
    module = Regression()
    module.load_state_dict(weights_of(path))
    again = run.validate(module, loader(VALIDATED), verbose=False)[0]["val"]
    own = trainer("ddp", max_epochs=1)
    own.fit(Regression(), loader())
    own.save_checkpoint(native)
    run = trainer(strategy("fsdp"))
    return [validated], [again], problem(lambda: run.fit(Regression(), loader(), ckpt_path=native))


def problem(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


class TwoOptimizers(Manual):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.heads)], []


class OwnBackward(Regression):
    def backward(self, loss):
        loss.backward()


class Odd(Regression):
    """Steps every second batch, in the way of Lightning's own documentation, where `zero_grad` drops the rest."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        if index % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Twice(Manual):
    """Two losses, each with its backward, in a step."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for scale in (1, 2):
            loss = (self(batch["x"] * scale) - batch["y"]).square().mean()
            self.manual_backward(loss)
            self.seen(loss)
        optimizer.step()


def continued(backend, folder):
    """Two trainers of one process, which save in one place; the second one continues."""
    losses = []
    for epochs in (1, 2):
        keeps = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        run = trainer(strategy(backend), max_epochs=epochs, callbacks=[keeps], enable_checkpointing=True)
        module = Twice()
        run.fit(module, loader(), ckpt_path=f"{folder}/last.ckpt" if losses else None)
        losses += module.losses
    return losses


def refusals(folder):
    """The message of each, with one rank."""

    def fit(module, given=None, cfg=None, **options):
        return problem(lambda: trainer(given or strategy("fsdp", **cfg or {}), **options).fit(module, loader()))

    trained = Regression()
    run = trainer(strategy("fsdp"), max_steps=1)
    run.fit(trained, loader())
    run.strategy.engine.save(folder)
    return {
        "two optimizers": fit(TwoOptimizers()),
        "accumulation": fit(Regression(), cfg={"training": {"gradient_accumulation_steps": 4}}),
        "clipping": fit(Regression(), cfg={"training": {"gradient_clipping": 0.5}}, gradient_clip_val=1.0),
        "by value": fit(Regression(), gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        "precision": fit(Regression(), precision="bf16-mixed"),
        "double": fit(Regression(), precision="64-true"),
        "own backward": fit(OwnBackward()),
        "average": fit(Regression(), callbacks=[StochasticWeightAveraging(1e-2)]),
        "fit again": fit(trained),
        "compiled": fit(torch.compile(Regression())),
        "devices": fit(Regression(), devices=3),
        "resume": problem(lambda: strategy("fsdp", checkpoint={"dir": folder, "on_existing": "resume"})),
        "odd": fit(Odd()),
        "remote": problem(lambda: run.save_checkpoint("s3://bucket/a.ckpt")),
        "of a loop": problem(lambda: trainer(strategy("fsdp")).validate(Regression(), loader(), ckpt_path=folder)),
        "of DDP": problem(lambda: UnishardStrategy({}, find_unused_parameters=True)),
        "plugin": fit(Regression(), plugins=[AsyncCheckpointIO()]),
        "no fit": problem(lambda: strategy("fsdp").engine),
    }


def agreed():
    """The precision that a trainer shows, where Lightning is told of it and where it is not."""
    runs = [trainer(strategy("fsdp", precision="bf16"), precision=given) for given in ("bf16-mixed", None)]
    for run in runs:
        run.fit(Regression(), loader())
        assert run.strategy.engine.gradients.loss_scale == 1.0
    return [run.precision for run in runs]


LAUNCHED = """
import lightning_programs as programs
import os
os.environ["LOCAL_WORLD_SIZE"] = "2"
run = programs.trainer(programs.strategy({backend!r}), devices=2, max_epochs=1)
run.fit(programs.Regression(), programs.loader())
run.strategy.engine.print(run.strategy.engine.world_size)
"""


def launched(folder, backend):
    """A script with `devices=2`, without a launcher."""
    (folder / "script.py").write_text(LAUNCHED.format(backend=backend))
    own = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(own)}
    return completed(
        [sys.executable, "script.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
