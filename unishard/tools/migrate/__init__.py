"""Move a training script with a loop of its own to unishard, as a diff."""
