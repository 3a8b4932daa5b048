"""Weights of linear layers in few bits, whose bytes are parameters like any other: sharded, gathered and saved.

| Module | Gives |
|---|---|
| `storage` | what is common to all ways to store a weight |
| `four_bit`, `int8` | the ways: from weights to bytes, and products with them |
| `linear` | the layer |
| `loading` | such layers in a model that has no data yet |
| `adoption` | such layers in place of those of bitsandbytes |
| `requirements` | whether bitsandbytes is there, and works on the device |

bitsandbytes keeps the scales of a weight beside its parameter, where no engine shards or saves them, looks them up by
the class of the parameter, which engines replace, and rewrites weights in an evaluation on the CPU. Here blocks and
scales are two parameters of dtype uint8, which no cast of a model reaches.
"""
