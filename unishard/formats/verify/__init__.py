"""Reads config files with the tools that they are for, and compares what those make of a source and of its translation.

The tables of the formats take no part in it: the values come from DeepSpeedConfig, Accelerate's launcher and plugins,
TrainingArguments, and `unishard.load`.
"""

from __future__ import annotations

from unishard.formats.verify.comparing import ComparedSetting, Verification, verify
from unishard.formats.verify.consumers import read_settings
from unishard.formats.verify.settings import AUTO, Effective, Settings

__all__ = ["AUTO", "ComparedSetting", "Effective", "Settings", "Verification", "read_settings", "verify"]
