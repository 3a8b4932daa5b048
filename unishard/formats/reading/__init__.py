"""From what a document says, entry by entry, to a config."""
