"""The model before it is sharded: units, dtypes, materialization, compilation, activation checkpointing."""
