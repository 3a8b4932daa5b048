"""The same training by plain torch in one process, and by frameworks whose ranks share samples."""

from __future__ import annotations

import torch
import transformers
from harness import my_rank
from torch.nn import functional

UPDATES, WINDOW, ROWS, LENGTH = 2, 2, 2, 13
"""Of samples that no two ranks divide evenly."""
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def sample(number):
    """Tokens of different lengths, of which the first have no labels."""
    ids = torch.randint(1, 48, (5 + number % 9,), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[: number % 5] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def samples(count=48):
    return [sample(number) for number in range(count)]


def collate(given):
    """To one length, behind the tokens."""
    empty = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = functional.pad
    return {
        name: torch.stack([pad(row[name], (0, LENGTH - len(row[name])), value=value) for row in given])
        for name, value in empty.items()
        if name in given[0]
    }


def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def summed(made, batch, smoothing=0.0):
    """The sum of the losses of a whole batch's tokens, and how many there are."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = made(**inputs).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss, (labels != -100).sum()


def plain(readers, *, mean="tokens", smoothing=0.0, updates=UPDATES, rate=0.1, data=None, made=None):
    """Losses, norms and weights of plain torch, of a number of readers.

    Args:
        readers: Groups of ranks that read samples of their own.
        mean: Of all `tokens` of an update, of each reader's tokens (`readers`), or of each `batch`.
        smoothing: Of labels.
        updates: How many.
        rate: Of learning.
        data: The samples in the order in which they are read; by default `samples()`.
        made: The model; by default `model()`.
    """
    made, data = made or model(), data or samples()
    optimizer = torch.optim.SGD(made.parameters(), lr=rate)
    losses, norms, each = [], [], WINDOW * readers
    for update in range(updates):
        sums = []
        for number in range(each):
            first = ROWS * (update * each + number)
            sums.append(summed(made, collate(data[first : first + ROWS]), smoothing))
        total = sum(count for _, count in sums)
        of_reader = [sum(count for _, count in sums[reader::readers]) * readers for reader in range(readers)]
        loss = sum(
            loss / {"tokens": total, "readers": of_reader[place % readers], "batch": count * each}[mean]
            for place, (loss, count) in enumerate(sums)
        )
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() for name, value in made.named_parameters()}, made


def equal(found, expected, weights, state, rank=0):
    """Compare what training made, on one rank the weights too."""
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-6, atol=1e-6)
    if my_rank() == rank:
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)
