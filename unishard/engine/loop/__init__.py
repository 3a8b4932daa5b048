"""The training loop: batches, call order, accumulation, evaluation, lockstep, trainable parameters."""
