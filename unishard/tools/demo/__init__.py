"""The demo: one training script, one config, both engines, and their loss curves in one plot."""
