"""The demo: one training script, one config, both engines, and their loss curves in one plot."""

from __future__ import annotations

from unishard.tools.demo.demo import DemoError, run_demo

__all__ = ["DemoError", "run_demo"]
