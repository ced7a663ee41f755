"""Streams over TCP between real processes: order, endings, and addresses."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from comm_collectives._torch_private import default_store, store_host
from comm_collectives.base.streams import sockets
from comm_collectives.base.streams.sockets import SocketStreams
from comm_collectives.errors import PeerFailedError
from ranktest import collect_ranks, run_ranks

_LIMIT_S = 30.0


def _streams(rank: int, size: int, key: str = "test") -> SocketStreams:
    return SocketStreams(rank=rank, size=size, store=default_store(), key=key)


def _send(streams: SocketStreams, peer: int, data: bytes) -> None:
    view, until_s = memoryview(data), time.monotonic() + _LIMIT_S
    while len(view):
        assert time.monotonic() < until_s
        view = view[streams.send_some(peer, view) :]
        streams.wait((), (peer,) if len(view) else (), 0.1 if len(view) else 0.0)


def _receive(streams: SocketStreams, peer: int, length: int) -> bytes:
    into, got, until_s = bytearray(length), 0, time.monotonic() + _LIMIT_S
    while got < length:
        assert time.monotonic() < until_s
        got += streams.recv_some(peer, memoryview(into)[got:])
        if got < length:
            streams.wait((peer,), (), 0.1)
    return bytes(into)


def test_bytes_arrive_in_order_between_all_pairs() -> None:
    def fn(rank: int, world_size: int) -> None:
        streams = _streams(rank, world_size)
        others = [peer for peer in range(world_size) if peer != rank]
        for peer in others:
            _send(streams, peer, bytes([rank, peer]) * 2000)
        for peer in others:
            assert _receive(streams, peer, 4000) == bytes([peer, rank]) * 2000
        dist.barrier()

    run_ranks(fn, 4)


def test_what_was_sent_before_the_end_is_still_received() -> None:
    def fn(rank: int, world_size: int) -> object:
        streams = _streams(rank, world_size)
        if rank == 1:
            _send(streams, 0, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        while streams.gone() != (1,):
            streams.wait((1,), (), 0.05)
            assert time.monotonic() < started + _LIMIT_S
        words = _receive(streams, 1, 10)
        # What goes to the dead is taken, and lost.
        return words, streams.send_some(1, memoryview(b"hello")), streams.recv_some(1, _room())

    outcomes = collect_ranks(fn, 2)
    assert outcomes[0].value == (b"last words", 5, 0)


def _room() -> memoryview:
    return memoryview(bytearray(8))


def test_full_stream_takes_nothing_and_says_when_there_is_room() -> None:
    def fn(rank: int, world_size: int) -> None:
        streams, data = _streams(rank, world_size), memoryview(bytes(1 << 24))
        total = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            _send(streams, 1, b"connected")
            while taken := streams.send_some(1, data):
                total += taken
        else:
            assert _receive(streams, 0, 9) == b"connected"
        dist.broadcast(total, src=0)
        if rank == 0:
            streams.wait((), (1,), _LIMIT_S)
            assert streams.send_some(1, data) > 0
        else:
            _receive(streams, 0, int(total))
        dist.barrier()

    run_ranks(fn, 2)


def test_forked_child_does_not_keep_a_connection_open() -> None:
    def fn(rank: int, world_size: int) -> object:
        streams = _streams(rank, world_size)
        if rank == 1:
            _send(streams, 0, b"x")
            if os.fork() == 0:
                time.sleep(5.0)
                os._exit(0)
            os._exit(0)
        _receive(streams, 1, 1)
        started = time.monotonic()
        while not streams.gone():
            streams.wait((1,), (), 0.05)
        return time.monotonic() - started

    assert collect_ranks(fn, 2)[0].value < 4.0


def test_stranger_without_the_token_is_turned_away() -> None:
    def fn(rank: int, world_size: int) -> None:
        streams = _streams(rank, world_size)
        key = "comm_collectives/streams/test/0"
        if rank == 1:
            _, port, host = default_store().get(key).decode().split(" ", 2)
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(bytes(16) + (1).to_bytes(8, "little"))
                _send(streams, 0, b"friend")
                dist.barrier()
        else:
            assert _receive(streams, 1, 6) == b"friend"
            dist.barrier()

    run_ranks(fn, 2)


def test_address_is_that_of_the_interface_that_gloo_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(rank: int, world_size: int) -> str:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        _streams(rank, world_size)
        with pytest.raises(PeerFailedError, match="GLOO_SOCKET_IFNAME='none7' names no interface"):
            os.environ["GLOO_SOCKET_IFNAME"] = "none7"
            _streams(rank, world_size, "other")
        os.environ["GLOO_SOCKET_IFNAME"] = ""
        return default_store().get("comm_collectives/streams/test/0").decode().split()[2]

    def of_rank(rank: int, world_size: int) -> str | None:
        return fn(rank, world_size) if rank == 0 else None

    assert run_ranks(of_rank, 2)[0] == "127.0.0.1"


def test_peer_that_cannot_be_reached_is_named_with_its_address() -> None:
    def fn(rank: int, world_size: int) -> str | None:
        if rank == 0:
            # 240.0.0.0/4 is routed nowhere.
            default_store().set("comm_collectives/streams/far/0", f"{'00' * 16} 9 255.255.255.255")
            dist.barrier()
            return None
        dist.barrier()
        streams = _streams(rank, world_size, "far")
        with pytest.raises(PeerFailedError) as caught:
            for _ in range(100):
                streams.send_some(0, memoryview(b"x"))
                streams.wait((), (0,), 0.05)
        return str(caught.value)

    text = run_ranks(fn, 2)[1]
    assert "rank 0 of the group cannot be reached at 255.255.255.255 port 9" in str(text)
    assert "set GLOO_SOCKET_IFNAME" in str(text)


def test_host_of_the_store_is_known_for_a_server_only() -> None:
    def fn(rank: int, world_size: int) -> bool:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)
        assert store_host(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "127.0.0.1"
        return store_host(dist.HashStore()) is None

    assert run_ranks(fn, 1) == [True]


def test_a_peer_whose_name_means_this_machine_is_no_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a machine whose hosts file gives its own name a loopback address."""

    def fn(rank: int, world_size: int) -> None:
        streams = _streams(rank, world_size)
        if rank == 1:
            streams._addresses[0] = f"{'0' * 32} 9 127.0.1.1"
            streams._refused(0, ConnectionRefusedError())  # of a rank of this machine that ended
            monkeypatch.setattr(sockets, "_own_host", lambda store: "10.1.2.3")
            with pytest.raises(PeerFailedError, match=r"cannot be reached at 127.0.1.1 .*GLOO_SOC"):
                streams._refused(0, ConnectionRefusedError())

    run_ranks(fn, 2)


def test_a_machine_whose_name_means_itself_is_known_by_its_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def by_hosts_file(host: str, *args: object, **kwargs: object) -> object:
        return resolve("127.0.1.1" if host == "node1" else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", by_hosts_file)
    hosts = {}
    for name in ("node1", "localhost", "127.0.0.1"):
        monkeypatch.setattr(sockets, "store_host", lambda store, name=name: name)
        hosts[name] = sockets._own_host(None)  # type: ignore[arg-type]
    assert hosts["node1"] == (sockets._way_out() or "127.0.0.1")
    assert {hosts["localhost"], hosts["127.0.0.1"]} <= {"127.0.0.1", "::1"}
