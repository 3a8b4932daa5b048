"""DistributedDataParallel: the wrapped model, and the mean of its gradients."""
