"""Weights as Hugging Face lays them out, from a running engine or from a checkpoint: the same bytes from either."""
