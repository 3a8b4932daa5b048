"""Rare cases of a run under `fully_shard`, a file each. `build` gives a run those that it has; a block of
`engine.weights.unsharded` is added where it begins.
"""
