"""What one GPU can prove about unishard, in pieces that stand alone; each has a CPU form with tiny sizes. See docs/gpu.md."""
