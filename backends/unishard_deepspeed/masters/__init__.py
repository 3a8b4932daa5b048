"""The user's torch optimizer inside DeepSpeed's, and the master weights that it steps."""
