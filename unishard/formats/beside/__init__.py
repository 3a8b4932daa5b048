"""What `--with` names beside a document, and which of the two decides what."""
