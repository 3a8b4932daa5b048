"""Starts ranks, trains something tiny, lets something go wrong at a point, and judges what came of it.

A test in the ranks is a function with asserts under `in_ranks`; what it returns is looked at by nobody. Faults, and
the points where they come, are in `dev.ranks.interception`; ranks that end as scripts end in `dev.ranks.scripts`.
"""

from dev.ranks.judging import *  # noqa: F403
from harness.curves import *  # noqa: F403
from harness.scenario import *  # noqa: F403
from harness.starting import *  # noqa: F403
from harness.training import *  # noqa: F403
