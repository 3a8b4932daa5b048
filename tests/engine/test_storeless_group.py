"""A process group of the caller's that is written in Python: torch gives it a store and keeps none in it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from unishard.failures import arrival, monitor_client


class InPython(dist.ProcessGroup):
    def __init__(self, store):
        super().__init__(0, 2)
        self.store = store


class WithStore(InPython):
    def get_group_store(self):
        return self.store


@pytest.fixture
def joined(monkeypatch):
    """What `join_group` connects by."""

    def join(kind):
        lines, group = [], kind(dist.HashStore())
        monkeypatch.setattr(arrival, "_world", None)
        monkeypatch.setattr(monitor_client, "current", lambda: None)
        monkeypatch.setattr(arrival.second_signal, "install", lambda: None)
        monkeypatch.setattr(arrival, "_connection", lambda store, *_: lines.append(store))
        started = SimpleNamespace(group=SimpleNamespace(WORLD=group), get_world_size=group.size, get_rank=group.rank)
        monkeypatch.setattr(arrival, "dist", started)
        arrival.join_group(timedelta(seconds=1), 1.0)
        return group, lines

    return join


def test_a_group_that_has_no_store_is_told_what_its_ranks_miss(joined, caplog):
    assert joined(InPython)[1] == []
    assert "return from its get_group_store the store" in caplog.text


def test_a_group_that_returns_its_store_is_connected(joined, caplog):
    group, lines = joined(WithStore)
    assert lines == [group.store]
    assert caplog.text == ""
