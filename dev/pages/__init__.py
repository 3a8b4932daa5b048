"""The pages that are generated from the schema, the rules and the tables: MAPPING.md, docs/schema.md and others."""
