"""Gradients in `parameter.grad`, and the update that a torch optimizer makes of them."""
