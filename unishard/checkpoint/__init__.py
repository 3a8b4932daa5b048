"""One checkpoint for every engine: a directory of torch.distributed.checkpoint and a manifest.

See docs/checkpoint-format.md.
"""
