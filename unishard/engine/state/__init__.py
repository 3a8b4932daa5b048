"""The run's state: parameter access, snapshot, restore, save and load, autosave."""
