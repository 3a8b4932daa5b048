"""Benchmarks and checks on one GPU, in independent pieces; each also runs on a CPU with tiny sizes. See docs/gpu.md."""
