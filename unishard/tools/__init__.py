"""What people run around a training: plan, compare, doctor, launch, demo, and the JSON Schema of the config."""
