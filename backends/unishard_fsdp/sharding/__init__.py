"""How a model is sharded, and which shard this rank holds."""
