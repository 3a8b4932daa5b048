"""How a config or a command starts its processes."""
