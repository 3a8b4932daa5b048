"""What DeepSpeed's optimizer is kept from, and its state by parameter."""
