"""For how long training stands still on rank 0 of many while it plans a save and writes the index, and without what
makes that short.

    python -m benchmarks.still                   # 64, 256 and 1,024 ranks; 32 of the 80 layers on the latter

Seconds of CPU in this process: those that a save takes for which training waits, and that a thread beside it takes of
Python's lock. A child process plans large background saves (`benchmarks.beside`), so that none of them are left.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.scale import cpu, local_plans, local_results, parameters, states_again
from unishard.checkpoint import index_classes, index_file, writing
from unishard.checkpoint.assignment import Places
from unishard.checkpoint.box_tables import box_table
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Planning

RANKS = {64: 80, 256: 80, 1024: 32}
"""By the number of ranks: layers of the model, which has 80."""


def pickled(
    tables: Sequence[tuple[str, int, Places]], files: Sequence[str], paths: Mapping[str, tuple[str, ...]]
) -> Iterator[bytes]:
    """What `index_file.pieces` writes, as torch would: objects for each chunk, and a pickle of them."""
    entries, placed = {}, {}
    for name, number, places in tables:
        tensor, (first, last, *columns) = places.tensors[number], places.of(number)
        table, chunks = box_table(tensor.shape, first, last), []
        rows = zip(table.offsets.tolist(), table.sizes.tolist(), *(column.tolist() for column in columns), strict=True)
        for row, (offsets, sizes, rank, at, length) in enumerate(rows):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = index_classes.place(files[rank], at, length)
            placed[MetadataIndex(name, chunks[-1].offsets, row)] = place
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    yield pickle.dumps(index_classes.index_of(entries, {name: paths[name] for name, *_ in tables}, placed))


def measured(world: int, layers: int) -> str:
    """A line on so many ranks."""
    names = [name for name in parameters() if not name.startswith("layers.") or int(name.split(".")[1]) < layers]
    planner, plans = local_plans(world, names, PlanCache())
    planner.cache.planning = planning = Planning()
    planner.create_global_plan([pickle.loads(plan) for plan in plans])
    results, again = local_results(world, names, planning), states_again(world, names)

    def save(sent: list[bytes]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            writer = writing._Writer(Path(folder), {}, lambda written: None, planner)

            def act() -> None:
                final, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])
                for plan in final:
                    pickle.dumps(plan)
                writer.finish(metadata, [pickle.loads(result) for result in results])

            return cpu(act)[0]

    with patch.object(index_file, "pieces", pickled):
        plain = save(plans)
    return (
        f"{world:,} ranks, {sum(planning.assignments[0]._records):,} chunks: {plain:.1f} s with a plan and torch's "
        f"pickle, {save(plans):.1f} s with a plan, {save(again):.1f} s where the last plan holds"
    )


def main() -> None:
    for world, layers in RANKS.items():
        print(measured(world, layers), flush=True)


if __name__ == "__main__":
    main()
