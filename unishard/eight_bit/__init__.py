"""AdamW with moments of 8 bits on shards, by the kernels of bitsandbytes: written once, for every engine.

| Module | Content |
|---|---|
| `codes` | blocks of 256 elements as codes and a scale, and back, to the bit |
| `moments` | the state of one rank's shard of a parameter |
| `adamw` | the optimizer |
| `kernel_hint` | a line of bitsandbytes that each rank would print |
"""

from __future__ import annotations
