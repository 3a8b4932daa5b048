"""A number that the host reads later."""

from __future__ import annotations

import pytest
import torch

from unishard.distributed.host_read import HostRead


def test_it_is_the_number_of_the_moment_it_was_made():
    value = torch.tensor(0.1)
    read = HostRead(value)
    value.zero_()
    assert read.get() == read.get() == torch.tensor(0.1).item()


@pytest.mark.gpu
def test_on_a_real_device_what_is_queued_later_is_not_waited_for():
    read = HostRead(torch.full((), 3, device="cuda"))
    torch.cuda._sleep(2 * 10**9)  # about a second
    assert read.get() == 3
    assert not torch.cuda.current_stream().query()
