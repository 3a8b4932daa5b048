"""Who has ended and why: the monitor of the ranks, the check of collective calls, the watchdog.

Nothing of it runs at import.
"""
