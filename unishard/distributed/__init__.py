"""The process group, tensors of which each rank holds a shard, and errors on all ranks."""
