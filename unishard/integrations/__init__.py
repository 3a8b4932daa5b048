"""Frameworks with a loop of their own, on unishard's engines: one module each, which alone imports its framework."""
