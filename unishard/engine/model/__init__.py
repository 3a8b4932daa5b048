"""Work on the model before it is sharded: units, dtypes, materialization, compilation, activation checkpointing."""
