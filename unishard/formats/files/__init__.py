"""Files as plain data: opened with the line of each key, and written as text."""
