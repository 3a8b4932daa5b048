"""Rare cases of a run on DeepSpeed, a file each. `build` gives a run those that it has."""
