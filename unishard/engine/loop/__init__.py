"""The loop: batches, the order of calls, evaluation, lockstep, which parameters train."""
