"""The port where the ranks meet, when another program has it: an error that says so, on rank 0 and on the others."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from unishard.distributed import serving
from unishard.errors import ConfigError, RankMismatchError

SOON = timedelta(seconds=5)


def test_a_program_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = f"127.0.0.1:{port}"
        said = (
            f"what listens at {where} does not answer as rank 0: another program has that port, or the machine "
            "hangs; set MASTER_PORT"
        )
        with pytest.raises(RankMismatchError, match=re.escape(said)):
            serving.connect(f"tcp://{where}", 1, 2, SOON, where)


def test_a_port_that_is_in_use_is_named_on_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"MASTER_PORT={port} is in use by another program"),
            serving.serving(port),
        ):
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=SOON, wait_for_workers=False)


def test_a_store_is_connected_to() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=SOON, wait_for_workers=False)
    found = serving.connect(f"tcp://127.0.0.1:{store.port}", 1, 2, SOON, "")
    store.set("key", "value")
    assert found.get("key") == b"value"
