"""The process group, tensors of which each rank holds a shard, errors on all ranks, and the check for mismatched collective calls."""
