"""Ranks of a comparison that are processes."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatron_moe.layout_check.verify import _reserved_port


def test_the_port_of_the_ranks_is_given_to_nobody_before_they_listen_there() -> None:
    with _reserved_port() as holder:
        port = holder.getsockname()[1]
        for host in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError):
                other.bind((host, port))
        store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"
