"""unishard inside training frameworks; each needs the framework, and is imported by itself."""
