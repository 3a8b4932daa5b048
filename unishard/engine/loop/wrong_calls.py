"""Which calls are wrong where in the loop: one table, place by call, and what is said of each."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.engine.place import Phase

Row = Mapping[Phase | str, str]
"""By place, a phase or what is true of `LoopPlace` or `OpenBlocks` there, the error; the first place counts."""
_Texts = dict[Phase | str, str]

_CLOSED: _Texts = {Phase.CLOSED: "{call} was called on a closed engine; build a new model and prepare it"}
_UNSHARDED: _Texts = {
    "unsharded": "{call} was called inside engine.weights.unsharded(), where weights are full for a forward and its "
    "backward; call it after the block"
}
_FROZEN: _Texts = {
    "frozen": "{call} was called inside engine.weights.frozen(), where no parameter is trainable; call it after the "
    "block"
}
_AVERAGED: _Texts = {
    "averaged": "{call} was called inside average.weights(), where the model has averaged weights; call it after the "
    "block"
}
_IN_WINDOW: _Texts = {
    "inside_window": "{call} was called inside an accumulation window; call it when step().updated or .skipped is true"
}
_GRAPH: _Texts = {
    "graph": "{call} would change a parameter that the backward of an earlier forward still needs; call it after "
    "backward, or drop the forward with engine.discard(); a forward under torch.no_grad() is allowed"
}
_NOT_FINAL: _Texts = {
    "gradients_not_final": "{call} was called after {done} of {window} backward calls of the window, when the "
    "gradients are not final; call it between the last backward of a window and engine.step()"
}

_NO_BACKWARD = "step was called without a backward; call engine.backward(loss) first, once for each micro-batch"

_BETWEEN_WINDOWS = _CLOSED | _UNSHARDED | _FROZEN | _AVERAGED | _IN_WINDOW
_WITHOUT_GRAPH = _CLOSED | _UNSHARDED | _AVERAGED | _GRAPH
_OF_GRADIENTS = _CLOSED | _NOT_FINAL

WRONG: Mapping[str, Row] = {
    "forward": {
        "failed": "forward was called after an error in the {failed} of the last micro-batch, of which gathered "
        "weights or gradients may be left; where you catch such an error, call engine.discard() to drop the window, on "
        "every rank",
        "averaged": "forward was called in training mode inside average.weights(); call engine.eval() first, or train "
        "after the block",
    },
    "backward": {
        Phase.BACKWARD_DONE: "backward was called twice for one micro-batch; add up the losses of its forwards, or "
        "call engine.step() after every backward; to send losses back one by one, set training.backward_calls to how "
        "many each micro-batch has",
        "forward_missing": "backward was called twice for one forward; each of the {backward_calls} calls for a "
        "micro-batch (training.backward_calls) needs a forward of its own: add up the losses of one forward",
        "only_evaluated": "backward was called in evaluation mode, where engine(...) builds no graph; call "
        "engine.train() before the forward",
        Phase.OPEN: "backward was called without a forward of the engine; compute the loss with engine(...) in "
        "training mode, not engine.module",
    },
    "step": _UNSHARDED
    | {
        "backward_missing": "step was called after {calls} of {backward_calls} backward calls of a micro-batch; call "
        "backward for each part of its loss first, or set training.backward_calls to how many there are",
        Phase.OPEN: _NO_BACKWARD,
        Phase.FORWARD_DONE: _NO_BACKWARD,
    },
    "set_boundary": _CLOSED
    | {
        Phase.BACKWARD_DONE: "set_boundary was called after backward; call engine.step() first, then set_boundary",
        "ramps": "training.batch_ramp says how long windows are, but the loop or its framework says where each one "
        "ends; remove training.batch_ramp",
        "length_known": "set_boundary was called after {micro_batch} of {window} micro-batches of a window; call it "
        "before each forward from the first one on, and not in a loop over engine.batches or engine.windows",
    },
    "begin_window": {
        "micro_batch": "a new accumulation window starts after {micro_batch} of {window} micro-batches of the last "
        "one; call backward and step for every batch, and leave a loop only when step().updated or step().skipped is "
        "true"
    },
    "go_on": {
        "gradients_read": "a window goes on after its gradients, or their norm, were read; read them only before the "
        "step of its last micro-batch"
    },
    "zero_grad": {
        "holds_gradients": "{call} was called after {done} of {window} backward calls of the accumulation window, and "
        "would drop their gradients; remove the call: engine.step() zeroes gradients after each update, and "
        "engine.discard() drops a window"
    },
    "weights.frozen": _CLOSED | _UNSHARDED,
    "save": _BETWEEN_WINDOWS,
    "export": _CLOSED | _UNSHARDED | _FROZEN | _IN_WINDOW,
    "weights.average": _BETWEEN_WINDOWS,
    "weights.set_trainable": _BETWEEN_WINDOWS,
    "load": _BETWEEN_WINDOWS | _GRAPH,
    "weights.load": _BETWEEN_WINDOWS | _GRAPH,
    "framework.release": _BETWEEN_WINDOWS | _GRAPH,
    "average.weights": _BETWEEN_WINDOWS | _GRAPH,
    "weights.write": _WITHOUT_GRAPH,
    "weights.gathered": _WITHOUT_GRAPH,
    "gradients.read": _OF_GRADIENTS,
    "gradients.write": _OF_GRADIENTS,
    "gradients.norm": _OF_GRADIENTS,
    "gradients.norms": _OF_GRADIENTS,
}
"""By call. Without it, most of these train on in silence: with gradients of two windows, of none, or of a forward that
nothing reduces; with averaged weights; or with a checkpoint of half a window."""

ANY: Row = _CLOSED
"""Of all other calls."""
