import socket
from collections.abc import Callable
from typing import Any

from ranktest import more_than_sockets_hold


def test_no_connection_takes_a_message_of_this_length_though_its_buffers_have_grown() -> None:
    length = more_than_sockets_hold()
    assert length % 64 == 0
    data, room = memoryview(bytes(length)), bytearray(1 << 24)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender, receiver = socket.create_connection(server.getsockname()), server.accept()[0]
    with sender, receiver:
        sender.setblocking(False)
        receiver.setblocking(False)
        sent = got = 0
        for _ in range(500):  # a receiver that keeps up makes its buffer grow
            sent += _some(sender.send, data)
            got += _some(receiver.recv_into, room)
        for _ in range(500):
            sent += _some(sender.send, data)
        assert 0 < sent - got < length


def _some(move: Callable[[Any], int], view: object) -> int:
    try:
        return move(view)
    except BlockingIOError:
        return 0
