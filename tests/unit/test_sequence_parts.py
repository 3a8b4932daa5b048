"""The parts of long sequences that need no ranks: who has which positions, documents, tiles of attention, batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unishard
from unishard.config.data_share import data_share_of
from unishard.errors import ConfigError, DataError, ModelError
from unishard.sequence import tiles as tiles_module
from unishard.sequence.batches import BatchSplitter
from unishard.sequence.context import KeyRule
from unishard.sequence.documents import documents_of
from unishard.sequence.layout import PositionLayout
from unishard.sequence.replaced_attention import require_plain_scores
from unishard.sequence.tiles import Scores, attend, tiles


def splitter(rank: int, size: int = 2, *, balanced: bool = False, **options: Any) -> BatchSplitter:
    return BatchSplitter(SimpleNamespace(rank=rank, size=size), PositionLayout(size, balanced=balanced), **options)  # type: ignore[arg-type]


@given(size=st.integers(2, 5), each=st.integers(1, 4), balanced=st.booleans())
def test_the_parts_of_all_ranks_are_the_whole(size: int, each: int, balanced: bool) -> None:
    layout = PositionLayout(size, balanced=balanced)
    whole = torch.arange(each * layout.multiple)[None]
    parts = torch.cat([layout.take(whole, rank) for rank in range(size)], 1)
    assert torch.equal(layout.join(parts, 1), whole)
    assert torch.equal(layout.split(whole, 1), parts)
    for rank in range(size):
        runs = [
            position
            for run in layout.runs(rank, whole.shape[1])
            for position in range(run.start, run.start + run.length)
        ]
        assert layout.take(whole, rank)[0].tolist() == runs


def test_balanced_parts_see_as_many_keys() -> None:
    layout = PositionLayout(4, balanced=True)
    work = [sum(int(position) + 1 for position in layout.take(torch.arange(64)[None], rank)[0]) for rank in range(4)]
    assert len(set(work)) == 1


@given(
    rule=st.builds(
        KeyRule,
        causal=st.booleans(),
        window=st.none() | st.integers(1, 9),
        chunk=st.none() | st.integers(1, 9),
    ),
    borders=st.sets(st.integers(1, 15), max_size=3),
    size=st.integers(1, 2),
    rank=st.integers(0, 1),
    softcap=st.none() | st.just(3.0),
)
def test_segments_attend_as_a_mask_says(
    rule: KeyRule, borders: set[int], size: int, rank: int, softcap: float | None
) -> None:
    length, starts = 16, [0, *sorted(borders)]
    documents = tuple(zip(starts, [*starts[1:], length], strict=True))
    query, key, value = (
        torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    layout = PositionLayout(size, balanced=size > 1)
    runs, scores = layout.runs(rank % size, length), Scores(0.5, softcap=softcap)
    own = layout.take(query, rank % size, 2)
    parts = [
        attend(own[:, :, queries], key[:, :, keys], value[:, :, keys], first, rule, scores)
        for queries, keys, first in tiles(runs, documents, rule)
    ]
    logits = query @ key.transpose(2, 3) * 0.5
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    weights = logits.masked_fill(~allowed(rule, documents, length), float("-inf")).softmax(-1)
    torch.testing.assert_close(torch.cat(parts, 2), layout.take(weights @ value, rank % size, 2), rtol=0, atol=1e-5)


def allowed(rule: KeyRule, documents: tuple[tuple[int, int], ...], length: int) -> torch.Tensor:
    """By the words of the rule, a pair of positions at a time."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for start, end in documents:
        for query in range(start, end):
            for key in range(start, end):
                near = rule.window is None or abs(query - key) < rule.window
                together = rule.chunk is None or (query - start) // rule.chunk == (key - start) // rule.chunk
                mask[query, key] = near and together and (key <= query or not rule.causal)
    return mask


@pytest.mark.parametrize(
    "options", [{}, {"window": 64}, {"softcap": 5.0}, {"sinks": True}, {"softcap": 5.0, "window": 64}], ids=str
)
def test_what_attention_keeps_for_backward_grows_with_the_sequence_not_its_square(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "_BLOCK", 128)
    kept = [kept_for_backward(length, **options) for length in (512, 1024)]
    assert kept[1] <= 2.2 * kept[0]


def kept_for_backward(length: int, *, sinks: bool = False, **options: Any) -> int:
    """Bytes."""
    query, key, value = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        given = {"sinks": torch.zeros(1, requires_grad=True)} if sinks else {}
        output = unishard.attention(query, key, value, **given, **options)
    output.sum().backward()
    return sum(found.values())


def test_documents_begin_where_positions_begin_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert documents_of(positions, None) == [((0, 3), (3, 5), (5, 6)), ((0, 6),)]


def test_padding_is_apart_and_holes_are_refused() -> None:
    positions = torch.arange(6).expand(3, -1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]])
    assert documents_of(positions, mask) == [((0, 2), (2, 6)), ((0, 4), (4, 6)), ((0, 1), (1, 5), (5, 6))]
    with pytest.raises(DataError, match="zeros between tokens"):
        documents_of(positions[:1], torch.tensor([[1, 0, 1, 1, 1, 1]]))


def test_labels_are_shifted_before_they_are_split() -> None:
    tokens = torch.arange(10, 16)[None]
    parts = [splitter(rank).split({"input_ids": tokens, "labels": tokens}) for rank in range(2)]
    assert [part["shift_labels"].tolist() for part in parts] == [[[11, 12, 13]], [[14, 15, -100]]]
    assert [part["labels"].tolist() for part in parts] == [[[10, 11, 12]], [[13, 14, 15]]]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_padding_has_no_labels_and_is_a_document_of_its_own() -> None:
    ones = torch.ones(1, 5, dtype=torch.long)
    batch = {"input_ids": ones, "labels": ones, "position_ids": torch.arange(5)[None]}
    part = splitter(1, multiple=8).split(batch)
    assert part["input_ids"].tolist() == [[1, 0, 0, 0]]
    assert part["labels"].tolist() == [[1, -100, -100, -100]]
    assert part["position_ids"].tolist() == [[4, 0, 1, 2]]


TOKENS = torch.arange(10, 16)[None]
IDS, NEXT = TOKENS[:, :-1], TOKENS[:, 1:]
SOME = IDS.where(IDS % 2 == 0, -1)
"""Labels of some positions, of a model that ignores -1."""


@pytest.mark.parametrize(
    ("batch", "padding"),
    [
        ((IDS, NEXT), (0, -100)),
        ((IDS, SOME), (0, -1)),
        ((IDS,), (0,)),
        ({"idx": IDS, "targets": IDS}, (0, -100)),
        ({"text": IDS, "next": NEXT}, (0, -100)),
        ({"x": IDS.float(), "y": IDS, "loss_mask": IDS.float()}, (0, -100, 0)),
    ],
    ids=str,
)
def test_padding_of_targets_counts_nothing_wherever_they_are(batch: Any, padding: tuple[int, ...]) -> None:
    part = splitter(1).split(batch)
    values = part.values() if isinstance(part, dict) else part
    assert tuple(int(value[0, -1]) for value in values) == padding


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((IDS, IDS.flip(1)), "tensor 1 of a batch has 5 positions, no multiple of 2, and .* cannot tell"),
        ({"input_ids": IDS, "tags": IDS.flip(1)}, "tags has 5 positions, no multiple of 2, and .* cannot tell"),
        ({"input_ids": IDS, "targets": IDS.float()}, "targets has 5 positions, .* in floating point"),
    ],
    ids=str,
)
def test_what_may_be_targets_is_not_padded(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        splitter(1).split(batch)
    even = [each[:, :4] for each in (batch.values() if isinstance(batch, dict) else batch)]
    assert splitter(1).split(tuple(even))[1].tolist() == even[1][:, 2:].tolist()


def test_a_single_tensor_says_what_it_is_padded_with() -> None:
    assert splitter(1).part(SOME)[0, -1] == -1
    assert splitter(1).part(IDS, fill=0)[0, -1] == 0
    with pytest.raises(DataError, match=r"fill=-100\) for targets"):
        splitter(1).part(IDS)


def test_which_tensors_are_split_is_decided_once() -> None:
    """A later memory that happens to be as long as the sequence is none; what was split stays as long."""
    split, memory = splitter(0), torch.ones(1, 6, 2)
    first = split.split({"input_ids": TOKENS[:, :4], "memory": memory})
    later = split.split({"input_ids": TOKENS, "memory": memory})
    assert later["input_ids"].shape == (1, 3)
    assert first["memory"].shape == later["memory"].shape == (1, 6, 2)
    other = splitter(0)
    other.split({"input_ids": TOKENS, "memory": memory})
    with pytest.raises(DataError, match=r"^memory was as long .* parallel\.sequence\.keys"):
        other.split({"input_ids": TOKENS[:, :4], "memory": memory})


def test_which_tensors_are_split() -> None:
    batch = {
        "input_ids": torch.zeros(2, 4, dtype=torch.long),
        "attention_mask": torch.ones(2, 1, 4, 4),
        "weights": torch.ones(2, 4, 3),
        "sample": torch.ones(2),
        "names": ["a", "b"],
        "seq_lens": torch.tensor([[1, 3], [4, 0]]),
    }
    part = splitter(0).split(batch)
    shapes = {name: tuple(value.shape) for name, value in part.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "input_ids": (2, 2),
        "attention_mask": (2, 1, 4, 4),
        "weights": (2, 2, 3),
        "sample": (2,),
        "seq_lens": (2, 2),
        "position_ids": (2, 2),
    }
    assert part["names"] is batch["names"]
    assert part["position_ids"].tolist() == [[0, 0], [0, 1]]
    named = splitter(0, names=["weights"]).split(batch)
    assert named["weights"].shape == (2, 2, 3)
    assert named["input_ids"].shape == (2, 4)


BORDERS = {
    "seq_lens": torch.tensor([[1, 3], [4, 0]]),
    "cu_seq_lens_q": torch.tensor([0, 1, 4, 8], dtype=torch.int32),
    "seq_idx": torch.tensor([[3, 5, 5, 5], [0, 0, 0, 0]], dtype=torch.int32),
}


@pytest.mark.parametrize("name", BORDERS)
def test_documents_are_known_by_each_word_for_them(name: str) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), name: BORDERS[name]}
    parts = [splitter(rank).split(batch)["position_ids"] for rank in range(2)]
    assert torch.cat(parts, 1).tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize(
    "beside",
    [{"position_ids": torch.arange(4).expand(2, 4)}, {"attention_mask": torch.ones(2, 4, dtype=torch.long)}],
    ids=["positions go on", "a mask"],
)
def test_documents_that_attention_would_join_are_refused(name: str, beside: dict[str, torch.Tensor]) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), name: BORDERS[name]} | beside
    with pytest.raises(DataError, match=rf"^{name} says .* at position 1 of sample 0, but attention would not keep"):
        splitter(0).split(batch)


def test_documents_are_not_joined_by_the_mask_of_padding() -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "seq_lens": BORDERS["seq_lens"]}
    with pytest.raises(DataError, match="packed documents have 4 positions, no multiple of 3"):
        splitter(0, 3, masks_padding=True).split(batch)


def test_batches_without_keys_are_split_as_they_are() -> None:
    first, second = splitter(1).split((torch.arange(8).view(2, 4), torch.ones(2)))
    assert first.tolist() == [[2, 3], [6, 7]]
    assert second.shape == (2,)
    with pytest.raises(DataError, match=r"parallel\.sequence\.keys"):
        splitter(0).split({"sample": torch.ones(2)})


def test_a_number_stands_for_the_size() -> None:
    cfg = unishard.load({"parallel": {"sequence": 4}})
    assert cfg.parallel.sequence.size == 4
    assert [data_share_of(cfg, unishard.Topology(8, 8, rank)) for rank in (0, 3, 4, 7)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"method": "ulysses"}, "method: is unused with size 1"),
        ({"size": 2, "pad_to": 6}, "pad_to: is 6, no multiple of 4"),
        ({"size": 2, "keys": []}, "keys: is empty"),
        ({"size": 0}, "size"),
    ],
)
def test_contradictions(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unishard.load({"parallel": {"sequence": section}})


def test_a_size_that_does_not_divide_the_ranks() -> None:
    cfg = unishard.load({"parallel": {"sequence": 4}})
    with pytest.raises(
        ConfigError, match=r"parallel\.sequence\.size: is 4, which does not divide 6 ranks; write 2 or 3"
    ):
        unishard.translate(cfg, topology=unishard.Topology(6, 6))


class _Attends(torch.nn.Module):
    """An attention layer of transformers."""


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "position_bias"])
def test_attention_that_changes_its_scores_is_refused_by_name(name: str) -> None:
    require_plain_scores(_Attends(), {name: None, "sliding_window": 4, "s_aux": torch.ones(2)})
    with pytest.raises(ModelError, match=f"_Attends chooses or changes scores of attention by {name}, "):
        require_plain_scores(_Attends(), {name: torch.ones(2)})
