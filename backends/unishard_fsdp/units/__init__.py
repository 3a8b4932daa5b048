"""What is done around the forward of each sharded module."""
