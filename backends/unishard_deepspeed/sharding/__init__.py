"""How a model is partitioned, and gathered."""
