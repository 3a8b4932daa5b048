"""What a model may do to logits that are made a few tokens at a time: the same loss and gradients, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unishard
from unishard.config import Config
from unishard.errors import ContractError, ModelError
from unishard.logits.forward import ChunkedForward, whole_logits
from unishard.tools.plan.tracing import trace

VOCABULARY, WIDTH, ROWS, LENGTH, CHUNK = 11, 6, 3, 7, 4
Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A head, and a loss of its logits."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("bias", torch.randn(1, VOCABULARY))
        self.loss = loss

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.lm_head(self.embedding(input_ids))
        return {"loss": None if labels is None else self.loss(self, logits, labels), "logits": logits}


def flat(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.flatten(), **more)


def assigned(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    logits[:, :, [2, 5]] = torch.finfo(logits.dtype).min
    return flat(logits, labels.where((labels != 2) & (labels != 5), -100))


def in_place(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    logits /= 3
    logits.mul_(2).add_(1)
    return flat(logits, labels)


def shifted(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits[..., :-1, :].contiguous(), labels[..., 1:])


def masked(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    keep = labels > 3
    return functional.cross_entropy(logits[keep].float(), labels[keep])


KEPT: dict[str, Loss] = {
    "mean": lambda model, logits, labels: flat(logits, labels),
    "sum": lambda model, logits, labels: flat(logits, labels, reduction="sum") / 5,
    "each token": lambda model, logits, labels: flat(logits, labels, reduction="none").square().mean(),
    "label smoothing": lambda model, logits, labels: flat(logits, labels, label_smoothing=0.2),
    "another label ignored": lambda model, logits, labels: flat(logits, labels.clamp(min=0), ignore_index=4),
    "scaled": lambda model, logits, labels: flat(2 * logits / 3, labels),
    "capped": lambda model, logits, labels: flat(torch.tanh(logits / 0.5) * 0.5, labels),
    "scaled by a parameter": lambda model, logits, labels: flat(model.scale * logits, labels),
    "biased": lambda model, logits, labels: flat(logits.float() + model.bias, labels),
    "part of the vocabulary": lambda model, logits, labels: flat(logits[..., :9], labels.clamp(max=8)),
    "assigned": assigned,
    "in place": in_place,
    "shifted": shifted,
    "masked": masked,
    "turned into rows twice": lambda model, logits, labels: flat(logits.reshape(-1, VOCABULARY)[:, :], labels),
    "two losses": lambda model, logits, labels: flat(logits, labels) + flat(logits * 2, labels.clamp(min=1)),
    "a loss without gradients": lambda model, logits, labels: (
        flat(logits, labels) * (1 + flat(logits.detach(), labels))
    ),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "softmax": (lambda model, logits, labels: logits.softmax(-1).mean(), "softmax"),
    "z-loss": (lambda model, logits, labels: torch.logsumexp(logits, -1).mean(), "logsumexp"),
    "mean": (lambda model, logits, labels: logits.mean(), "mean"),
    "transposed": (lambda model, logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels), "transpose"),
    "not in rows": (
        lambda model, logits, labels: functional.cross_entropy(logits[0, 0], labels[0, 0]),
        "cross_entropy",
    ),
    "a word": (lambda model, logits, labels: logits[..., 0].mean(), "getitem"),
    "by position": (lambda model, logits, labels: flat(logits + torch.randn(LENGTH, 1), labels), "add"),
    "with weights": (lambda model, logits, labels: flat(logits, labels, weight=torch.ones(VOCABULARY)), "weights"),
    "another shape": (lambda model, logits, labels: logits.view(ROWS, -1).mean(), "view"),
    "cut by position": (lambda model, logits, labels: assign_at(logits, (0, 0, 0)), "setitem"),
    "read": (lambda model, logits, labels: logits * logits[0, 0, 0].item(), "getitem"),
    "no loss of logits": (lambda model, logits, labels: model.scale.square(), "computed no cross entropy"),
}


def assign_at(logits: Tensor, index: Any) -> Tensor:
    logits[index] = 0.0
    return logits.mean()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.where(tokens != 1, -100)}


def trained(model: nn.Module) -> tuple[float, dict[str, Tensor | None]]:
    loss = model(**batch())["loss"]
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_the_same_for_each_token_is_done_to_each_chunk(name):
    loss, gradients = trained(Model(KEPT[name]))
    model = Model(KEPT[name])
    ChunkedForward(model, CHUNK)
    in_chunks, own = trained(model)
    assert in_chunks == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_tokens_is_refused_by_name(name):
    loss, word = REFUSED[name]
    model = Model(loss)
    ChunkedForward(model, CHUNK)
    with pytest.raises(ModelError, match=rf"Model .*{word}.*leave training.loss_chunk_tokens out"):
        model(**batch())
    assert "lm_head" not in vars(model)


@pytest.mark.parametrize("use", ["item", "tolist", "numpy", "argmax", "float", "__bool__", "softmax"])
def test_logits_in_the_output_say_that_they_were_not_made(use):
    model = Model(KEPT["mean"])
    ChunkedForward(model, CHUNK)
    logits = model(**batch())["logits"]
    with pytest.raises(ContractError, match=r"not made, because of training\.loss_chunk_tokens"):
        getattr(logits, use)(*([-1] if use == "softmax" else [])) + 1
    assert (logits.shape, logits.dtype, logits.device.type) == ((ROWS, LENGTH, VOCABULARY), torch.float32, "cpu")


def test_no_logits_of_more_tokens_than_a_chunk_are_made():
    sizes = []
    model = Model(KEPT["capped"])
    ChunkedForward(model, CHUNK)
    own = model.lm_head.forward
    model.lm_head.forward = lambda rows: sizes.append(len(rows)) or own(rows)
    trained(model)
    chunks = [4, 4, 4, 4, 4, 1]
    assert sizes == chunks + chunks[::-1]


def test_what_was_saved_for_backward_does_not_grow_with_the_vocabulary():
    saved = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    model = Model(KEPT["mean"])
    ChunkedForward(model, CHUNK)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch())
    assert max(saved) <= ROWS * LENGTH * WIDTH


def test_without_labels_and_in_a_block_of_whole_logits_the_model_runs_as_ever():
    model = Model(KEPT["mean"])
    ChunkedForward(model, CHUNK)
    with pytest.warns(UserWarning, match="does nothing in a forward without labels"):
        logits = model(batch()["input_ids"])["logits"]
    with whole_logits():
        whole = model(**batch())["logits"]
    assert torch.equal(logits, whole)
    assert type(logits) is Tensor


def test_positional_labels_and_an_outer_checkpoint():
    loss, gradients = trained(Model(KEPT["mean"]))
    model = Model(KEPT["mean"])
    ChunkedForward(model, CHUNK)
    output = checkpoint(lambda *args: model(*args)["loss"], *batch().values(), use_reentrant=False)
    output.backward()
    assert output.item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, gradients["lm_head.weight"], rtol=1e-5, atol=1e-6)


def test_a_model_without_a_head_and_a_head_with_hooks_are_refused():
    with pytest.raises(ModelError, match="Linear has no head that get_output_embeddings names"):
        ChunkedForward(nn.Linear(2, 2), CHUNK)
    model = Model(KEPT["mean"])
    model.lm_head.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ModelError, match="lm_head has forward hooks"):
        ChunkedForward(model, CHUNK)


def test_dropout_in_a_head_is_the_same_in_forward_and_backward():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCABULARY))
    hidden, labels = torch.randn(20, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (20,))
    torch.manual_seed(1)
    unishard.chunked_loss(head, hidden, labels, chunk_tokens=20).backward()
    found, hidden.grad = hidden.grad, None
    torch.manual_seed(1)
    functional.cross_entropy(head(hidden), labels, reduction="sum").backward()
    torch.testing.assert_close(found, hidden.grad)


def test_arguments_of_the_function_are_checked():
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(2, 5, WIDTH)
    with pytest.raises(ContractError, match="chunk_tokens must be 1 or more, got 0"):
        unishard.chunked_loss(head, hidden, torch.zeros(2, 5, dtype=torch.long), chunk_tokens=0)
    with pytest.raises(ContractError, match=r"\[2, 5, 6\] and labels \[2, 4\] do not fit"):
        unishard.chunked_loss(head, hidden, torch.zeros(2, 4, dtype=torch.long), chunk_tokens=3)


def test_a_plan_has_the_memory_of_a_chunk():
    peaks = []
    for chunk_tokens in (None, 8):
        cfg, fake = Config.model_validate({"training": {"loss_chunk_tokens": chunk_tokens}}), FakeTensorMode()
        with fake:
            model = Model(KEPT["mean"])

        def tokens(samples: int, length: int) -> dict[str, Tensor]:
            return {name: torch.zeros(samples, length, dtype=torch.long) for name in ("input_ids", "labels")}

        activations = trace(
            model, cfg, tokens, lambda output: output["loss"], micro_batch_size=1, seq_len=256, fake=fake, noted=[]
        )
        peaks.append(activations.peak)
    assert peaks[1] < 0.6 * peaks[0]
