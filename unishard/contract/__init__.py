"""What the core and the backends agree on: the protocol, the tables of fields and keys, the report, the registry,
private names.
"""
