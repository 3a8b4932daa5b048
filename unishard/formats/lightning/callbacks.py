"""What the Trainer's `callbacks` ask of a training loop (2.6.6, pytorch/callbacks)."""

from __future__ import annotations

from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, KeyEffect, left_out
from unishard.contract.rules import Fit
from unishard.formats.lightning.built import built, short
from unishard.formats.lightning.rows import off
from unishard.formats.names import names

_TRAINING = {
    "GradientAccumulationScheduler": "the length of windows: engine.windows(loader, lengths=...)",
    "StochasticWeightAveraging": "the averaged weights: torch.optim.swa_utils over engine.weights.read(...)",
    "WeightAveraging": "the averaged weights: torch.optim.swa_utils over engine.weights.read(...)",
    "EMAWeightAveraging": "the averaged weights: engine.weights.average(decay)",
    "EarlyStopping": "when to stop",
    "LearningRateFinder": "the learning rate; write what it found as optimizer.lr",
    "BatchSizeFinder": "the batch size; write what it found as training.micro_batch_size",
    "BackboneFinetuning": "what is frozen when: engine.weights.set_trainable(...)",
    "BaseFinetuning": "what is frozen when: engine.weights.set_trainable(...)",
    "ModelPruning": "which weights are zero: engine.weights.write(...)",
    "LambdaCallback": "what it calls",
}
_QUIET = names(
    "ModelCheckpoint OnExceptionCheckpoint LearningRateMonitor DeviceStatsMonitor ModelSummary RichModelSummary "
    "TQDMProgressBar RichProgressBar ProgressBar Timer ThroughputMonitor SpikeDetection"
)


def callbacks(value: Any, document: DocumentValues) -> KeyEffect:
    """What they do to the training beyond logs and files, which the loop does."""
    items = value if isinstance(value, list | tuple) else [value]
    callback_names = [
        short(callback.path) if (callback := built(item)) else shown(item) for item in items if not off(item)
    ]
    asked = [
        f"{name} decides {_TRAINING.get(name, 'what only its code says')}"
        for name in callback_names
        if name not in _QUIET
    ]
    if asked:
        return KeyEffect(Fit.NEEDS_INPUT, f"your training loop does it: {'; '.join(asked)}")
    return left_out("callbacks that only log, report or write files")
