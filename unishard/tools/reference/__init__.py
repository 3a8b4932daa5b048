"""The generated pages: MAPPING.md, docs/schema.md, docs/formats.md and others."""
