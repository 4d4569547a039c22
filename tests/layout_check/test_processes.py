"""Port of the rank processes."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatron_moe.layout_check.verify import _reserved_port


def test_reserved_port_is_free_only_for_the_store_of_the_ranks() -> None:
    with _reserved_port() as holder:
        port = holder.getsockname()[1]
        for host in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError):
                other.bind((host, port))
        store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"
