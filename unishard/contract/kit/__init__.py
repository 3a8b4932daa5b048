"""What a backend may use of the core at run time, besides the contract and `unishard.distributed`.

| Module | Gives |
|---|---|
| `materialization`, `shared_memory` | build parameters on the device, a part at a time |
| `dtypes`, `input_casts`, `kept_fp32` | cast a model and its inputs, but for what stays in fp32 |
| `parameter_groups` | the groups of the config's optimizer |
| `grad_norm`, `skipping` | norm and scaling of gradients; an update that the device skips |
| `empty_parameters`, `forwards`, `tracebacks` | what a model's modules are: empty, recomputed, compiled, in an error |

A backend imports nothing else of the core: a contract of import-linter holds it.
"""

from __future__ import annotations
