"""Saves on one engine and resumes on the other, and on the same one to the bit. Run in the environment:
`resuming.py OUT.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from unishard.testing import resuming
from unishard.testing.conformance import TOLERANCES
from unishard.testing.resuming import Pair, ResumedRun

FSDP, DEEPSPEED = ResumedRun("fsdp", "full_shard", 2), ResumedRun("deepspeed", "full_shard", 2)
PAIRS = (
    Pair(FSDP, FSDP),
    Pair(DEEPSPEED, DEEPSPEED),
    Pair(FSDP, replace(DEEPSPEED, strategy="shard_grad_op")),
    Pair(DEEPSPEED, replace(FSDP, strategy="shard_optimizer")),
    Pair(replace(FSDP, strategy="no_shard", precision="bf16"), replace(DEEPSPEED, precision="bf16")),
    Pair(replace(DEEPSPEED, strategy="no_shard", precision="bf16"), replace(FSDP, precision="bf16")),
)


def main(out: Path) -> None:
    out.write_text(json.dumps({str(pair): resumed(pair) for pair in PAIRS}), encoding="utf-8")


def resumed(pair: Pair) -> dict[str, Any]:
    try:
        found = resuming.measure([pair])[pair]
    except AssertionError as failure:  # a rank failed, died or hung
        return {"losses": None, "wrong": str(failure).strip().splitlines()[0][:300]}
    wrong = "" if _holds(pair, found) else f"does not go on as the run without a break: {found}"
    return {"losses": float(f"{found.losses:.1e}"), "wrong": wrong}


def _holds(pair: Pair, found: resuming.Resumption) -> bool:
    """Whether the run goes on; in bf16 from the same bits, and then within the bound of all losses.

    The bound of the first three losses is for one version of torch: with the kernels of another, the last digits of a
    sum turn the rounding of a weight to bf16 within them.
    """
    bits = found.same_state and found.losses <= TOLERANCES[pair.saved.precision].losses
    return bits if pair.saved.precision == "bf16" else resuming.holds(pair, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
