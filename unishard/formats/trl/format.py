"""Reads and writes YAML of TRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.formats.hf.format import ScriptFormat
from unishard.formats.hf.loop import off
from unishard.formats.hf.quantizing import with_trls_words
from unishard.formats.names import names
from unishard.formats.reading.document import ReadDocument

_KINDS: Mapping[float, tuple[str, ...]] = {
    1e-6: names(
        "reward_funcs num_generations max_completion_length max_prompt_length precompute_ref_log_probs "
        "desirable_weight beta undesirable_weight reference_free sync_ref_model use_vllm teacher_model_name_or_path"
    ),
    1e-4: names("center_rewards_coefficient"),
}
"""Keys by which it shows that a file is not for SFT, by the learning rate that its config assumes (TRL 1.16,
trainer/*_config.py)."""
_SFT = 2e-5
_OFFLOADED, _SWITCH = "offload.activations", "activation_offloading"
_ARGUMENTS = "gradient_checkpointing_kwargs"


class TrlFormat(ScriptFormat):
    """YAML of `trl sft`, `trl dpo` and the like."""

    name = "trl"
    tool = "TRL 1.16"
    switched_on = ("gradient_checkpointing", "bf16")
    loads: Mapping[str, Native] = {"bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}}

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """bf16 unless fp16 is on, recomputed activations, and a rate for each kind of training."""
        rate = next((rate for rate, keys in _KINDS.items() if any(key in data for key in keys)), _SFT)
        return {"bf16": off(data.get("fp16")), "gradient_checkpointing": True, "learning_rate": rate}

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The arguments that train, with TRL's own switch for activations in host memory."""
        rendered = with_trls_words(super().write(reading, topology), reading.config)
        if _OFFLOADED not in rendered.fields or reading.config.offload.activations == "none":
            return rendered
        document = {**rendered.document, _SWITCH: True}
        if _ARGUMENTS in document:  # transformers would offload them once more
            document[_ARGUMENTS] = {name: it for name, it in document[_ARGUMENTS].items() if name != "offload"}
        return RenderedDocument(document, {**rendered.fields, _OFFLOADED: FieldResult.held(_SWITCH)})


FORMAT = TrlFormat()
