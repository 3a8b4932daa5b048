"""Activations in host memory: what the backward of a unit needs leaves the device after its forward, and comes back
before its backward.

```text
forward    unit 0 | unit 1 | unit 2 | ...       backward   ... | unit 2 | unit 1 | unit 0
to host           |   0    |   1    | ...       to device  ... |   1    |   0    |
```

Each unit is wrapped as activation checkpointing wraps it, in `forward`, so the engines' hooks stay outside:

| file | |
|---|---|
| `units.py` | finds the units and wraps them; says which tensors go |
| `unit_graphs.py` | the forwards whose backward is to come, and their order: what to fetch ahead |
| `store.py` | copies storages to host memory and back, on a stream of their own |
| `saved.py` | what stands for a saved tensor in the graph |
| `weights.py` | tells weights from activations |
"""
