"""The part of its time that a run spends on updates that count, where failures come at random."""
