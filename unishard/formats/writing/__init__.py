"""What stays as it is where a document is written again, or carried beside the tables."""
