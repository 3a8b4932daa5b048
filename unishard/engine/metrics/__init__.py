"""What `logging` records of a training: loss, norm, learning rate, throughput, memory, and the user's own values."""
