"""The run-time half: the engine, and what every backend shares once torch is there."""
