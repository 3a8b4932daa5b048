"""Hypothesis without a clock and without chance: the same examples everywhere, but where a number of them is asked for."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unishard", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unishard")
