"""The store where the ranks of a run meet, served by rank 0: on this machine only, where its address is one that no
other can reach.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unishard.config.topology import has_one_agent


def is_local(host: str) -> bool:
    """Whether all ranks are on one machine, so that nothing has to listen to others.

    Args:
        host: The address of rank 0.
    """
    return is_loopback(host) or has_one_agent()


def is_loopback(host: str) -> bool:
    """Whether an address is one that only its own machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(host: str, port: int, size: int, timeout: timedelta) -> Any:
    """Serve a store. It listens to other machines only if its address is one that they can reach.

    Args:
        host: The address, as all ranks know it.
        port: The port.
        size: Number of ranks.
        timeout: Of requests.
    """
    options: dict[str, Any] = {}
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError):  # a store of this process serves there already
            # torch itself listens on all addresses (torch 2.13, TCPStoreLibUvBackend.cpp).
            options["master_listen_fd"] = socket.create_server((host, port), family=family, backlog=size).detach()
    server: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    return server(
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True, **options
    )
