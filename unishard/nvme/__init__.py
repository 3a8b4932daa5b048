"""What `offload` with `nvme` keeps in files: the optimizer's state and weights, the same on every engine."""
