"""Connections to the workers' store."""

import gc
import os
import time
from datetime import timedelta

import pytest
from torch import distributed
from worker_processes import free_port

from mirrorc.cluster.stores import OwnConnection


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the sockets of a process cannot be seen")
def test_a_connection_knows_when_the_host_of_the_store_has_ended() -> None:
    port = free_port()
    made = {"port": port, "timeout": timedelta(seconds=20), "wait_for_workers": False}
    host = distributed.TCPStore("127.0.0.1", is_master=True, **made)
    store = distributed.TCPStore("127.0.0.1", is_master=False, **made)
    connections = [OwnConnection(distributed.PrefixStore(name, store), 20.0) for name in ("one", "other")]
    connections[0].store.set("a", "1")
    assert not any(connection.is_lost for connection in connections)
    del host
    gc.collect()
    until = time.monotonic() + 60
    while not all(connection.is_lost for connection in connections) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(connection.is_lost for connection in connections)


def test_a_store_without_connections_is_not_lost() -> None:
    assert not OwnConnection(distributed.PrefixStore("one", distributed.HashStore()), 20.0).is_lost
