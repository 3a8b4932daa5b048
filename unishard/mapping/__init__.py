"""Tables of rows: what a backend or a tool makes of each field of the config, and what each key of a tool says in its words."""
