"""Where ranks meet that srun has started."""

from __future__ import annotations

import pytest

from unishard.process_group import first_host


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[3,9]", "gpu3"),
        ("a.example.org,b", "a.example.org"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
