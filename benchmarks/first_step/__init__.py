"""Seconds from the start of the processes to the first step, beside loops by hand and Accelerate."""
