"""What training scripts without unishard hand to an engine: its own arguments, read and written.

Other tools' files wrap them, so `unishard.formats` finds them by the entry point `unishard.arguments`. No run imports
this package::

    deepspeed/ ──▶ the JSON of `deepspeed.initialize`
    fsdp/      ──▶ arguments of FSDP1's constructor and of `fully_shard`
"""

from __future__ import annotations
