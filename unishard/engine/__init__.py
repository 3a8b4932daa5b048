"""The engine and its parts: everything at run time that the backends share. Imports torch."""
