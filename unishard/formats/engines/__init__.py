"""An engine's own arguments inside the document of another tool."""
