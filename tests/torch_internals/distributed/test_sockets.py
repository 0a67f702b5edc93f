"""Which sockets this process has, and which of them the other side has closed."""

import contextlib
import os
import socket

import pytest

from mirrorc.torch_internals.distributed.process_groups import connections_since, is_any_closed, open_sockets

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the sockets of a process cannot be seen")


def test_new_connections_to_a_port_are_told_from_others_and_seen_when_they_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as old:
            before = open_sockets()
            with socket.create_connection(("127.0.0.1", port)) as new, socket.create_connection(other.getsockname()):
                found = connections_since(before, port)
                assert set(found) == {new.fileno()} and old.fileno() in before
                accepted = [listener.accept()[0] for _ in range(2)]
                assert not is_any_closed(found)
                accepted[1].close()
                assert is_any_closed(found)
                accepted[0].close()
            assert is_any_closed(found), "by this process"


def test_only_the_given_sockets_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign of life asks, in a process that may have thousands of files open."""

    def refuse(*_: object) -> None:
        pytest.fail("all files of the process are listed")

    one, other = socket.socketpair()
    with one, other:
        given = {one.fileno(): open_sockets()[one.fileno()]}
        monkeypatch.setattr(os, "listdir", refuse)
        assert not is_any_closed(given)
        other.close()
        assert is_any_closed(given)


def test_a_number_that_another_file_has_got_is_a_closed_socket() -> None:
    with contextlib.ExitStack() as opened:
        one, _, third, _ = (
            opened.enter_context(each) for pair in (socket.socketpair(), socket.socketpair()) for each in pair
        )
        number, known = one.fileno(), open_sockets()
        given = {number: known[number]}
        os.dup2(third.fileno(), number)
        assert is_any_closed(given), "another socket"
        with open(os.devnull) as nowhere:
            os.dup2(nowhere.fileno(), number)
        assert is_any_closed(given), "no socket"
