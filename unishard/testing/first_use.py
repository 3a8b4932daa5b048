"""Imports what torch, the engines and models import at their first use, for the server from which ranks are forked.

It takes 0.2 s to 2 s of CPU time, which each rank would need. `torch._inductor.compile_fx` is what `torch.compile`
imports, and DeepSpeed uses that for every engine (0.19.8, runtime/zero/muon/original_muon.py).
"""

from __future__ import annotations

import contextlib
from importlib import import_module

_NAMES = (
    "encodings.idna",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "peft",
    "unishard_fsdp.native",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.utils.pin_memory",
)

for _name in _NAMES:
    with contextlib.suppress(Exception):  # another version may have other modules; ranks then import them themselves
        import_module(_name)
