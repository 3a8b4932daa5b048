"""Memory and traffic of a run before it starts, for every engine and strategy: `unishard plan`.

The core is pure and imports no torch: `candidates_of` takes the shape of a model and of its activations. Computing
those two needs torch, but no data and no accelerator: `unishard.tools.plan.model` and `unishard.tools.plan.tracing`.
"""
