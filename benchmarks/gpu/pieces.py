"""The pieces, in the order in which they run. Imports nothing but the standard library."""

from __future__ import annotations

from typing import NamedTuple

BUDGET = 2400
"""Seconds for all pieces on one GPU."""


class Piece(NamedTuple):
    """One thing to prove."""

    name: str
    """Also its JSON file's, before the device."""
    module: str
    """Of this package; has `run(report)`, or `run(report, *arguments)`."""
    about: str
    limit: int
    """Seconds after which it is ended: below 10 minutes."""
    arguments: tuple[str, ...] = ()
    alone: bool = False
    """Whether it measures what others would disturb."""


PIECES = (
    Piece(
        "imports",
        "imports",
        "both engines import, train 2 steps and exit with code 0, and print nothing but warnings",
        240,
    ),
    Piece("cells", "cells", "both engines against plain torch on the same device, one rank", 540),
    Piece("resume", "resume", "a checkpoint of one engine resumed by the other", 300),
    Piece("frameworks", "frameworks", "loops of training frameworks on both engines beside the frameworks' own", 300),
    Piece("two_ranks", "two_ranks", "two ranks on one device against plain torch", 560),
    Piece("parallel", "parallel", "layers, experts and sequences over ranks, for which it needs two cards", 560),
    Piece("offload", "offload", "pinned offload, 50 times the same bits", 540),
    Piece("async_save", "async_save", "a checkpoint written while training continues", 240),
    Piece("memory", "memory", "the peak that `unishard plan` says, out-of-memory errors, and snapshots", 400),
    Piece("sequence", "sequence", "the longest sequence of layers of an 8B Llama on one card", 580, alone=True),
    Piece("models", "models", "every model of docs/models-tested.md beside plain torch", 500),
    Piece("compile", "compiled", "one graph for all blocks of a default Llama", 300),
    Piece("syncs", "syncs", "host-device synchronizations of an optimizer step", 240, alone=True),
    Piece("throughput_1b", "throughput", "a 1B Llama in bf16 beside loops written by hand", 570, ("1b",), alone=True),
    Piece("throughput_3b", "throughput", "a 3B Llama in bf16 beside loops written by hand", 570, ("3b",), alone=True),
)
