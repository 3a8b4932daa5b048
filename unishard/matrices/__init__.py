"""Optimizers whose update needs whole matrices, such as Muon, on shards: written once, for every engine.

| Module | Content |
|---|---|
| `layout` | which interval of which matrix each rank holds, and which rank owns it |
| `exchange` | shards of gradients to the owner of their matrix, shards of its update back |
| `matrix_optimizer` | the base class: an optimizer is what it does with one whole matrix |
| `muon` | the first of them |
"""

from __future__ import annotations
