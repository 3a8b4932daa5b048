"""What stands beside a config and decides what it leaves open: a launch script, or TrainingArguments."""
