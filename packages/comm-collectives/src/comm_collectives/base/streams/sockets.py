"""Streams over TCP: one connection for each pair of ranks, made when the pair first needs it.

The lower rank of a pair listens and the higher one connects. Addresses stand in the store, each
with a random token that whoever connects has to show: that of the interface in GLOO_SOCKET_IFNAME,
else the one that routes to the store's host, else that of the host's name, else loopback.
Invariant: a peer is gone once its connection has ended, however its process did; what it had sent
can still be received. A forked child keeps none of the connections.

    streams = SocketStreams(rank=0, size=4, store=store, key="calls")
"""

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from secrets import token_bytes
from typing import final
from weakref import WeakSet

from comm_collectives._torch_private import Store, store_host
from comm_collectives.base.streams.streams import Streams
from comm_collectives.errors import PeerFailedError
from comm_collectives.units import POLL_S

if sys.platform == "linux":
    import fcntl

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sq")  # token of the listener, rank that connects
_FIRST_PAUSE_S = 0.001  # between two looks into the store, doubled up to
_LONGEST_PAUSE_S = 0.05
_ASK_S = 0.5  # between two looks whether a peer that has not connected has ended
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_REMEDY = (
    "every rank must reach every other one by TCP; if this is the address of the wrong interface, "
    "set GLOO_SOCKET_IFNAME to the right one on each host"
)
_OPEN: "WeakSet[SocketStreams]" = WeakSet()


@final
class SocketStreams(Streams):
    """See the module; `store` and `key` are the same on every rank, and `key` used only once.

    `has_lost` is asked now and then for a peer that has not connected, should it know that the peer
    has ended.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        store: Store,
        key: str,
        has_lost: Callable[[int], bool] | None = None,
    ) -> None:
        self.rank, self.size, self._has_lost = rank, size, has_lost
        self._asks_at_s = time.monotonic() + _ASK_S
        self._store, self._key = store, key
        self._token = token_bytes(_TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._unnamed: list[socket.socket] = []  # accepted, and has not said who it is
        self._connecting: dict[int, socket.socket] = {}
        self._addresses: dict[int, str] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._gone: set[int] = set()
        self._opening = threading.RLock()
        if rank < size - 1:
            self._listen()
        _OPEN.add(self)

    def send_some(self, peer: int, data: memoryview) -> int:
        """See Streams."""
        if peer in self._gone:
            return len(data)
        connection = self._sockets.get(peer) or self._connect(peer)
        if connection is None:
            return 0
        try:
            return connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # broken pipe, reset, timed out
            self._mark(peer)
            return len(data)

    def recv_some(self, peer: int, into: memoryview) -> int:
        """See Streams."""
        connection = self._sockets.get(peer) or self._connect(peer)
        if connection is None or not len(into):
            return 0
        try:
            got = connection.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError:
            got = 0
        if not got:
            self._mark(peer)
        return got

    def wait(self, receiving: Collection[int], sending: Collection[int], timeout_s: float) -> None:
        """See Streams."""
        for peer in {*receiving, *sending} - self._sockets.keys():
            self._connect(peer)
        poll = select.poll()
        for peer, connection in list(self._sockets.items()):
            if peer not in self._gone:
                mask = select.POLLIN if peer in receiving else 0
                mask |= select.POLLOUT if peer in sending else 0
                poll.register(connection, mask | _GONE)
        wanted = {*receiving, *sending} - self._sockets.keys() - self._gone
        if wanted:
            timeout_s = min(timeout_s, self._await(wanted, poll))
        ended = {fd for fd, event in poll.poll(1000 * timeout_s) if event & _GONE}
        if ended:
            self._mark(*[r for r, one in list(self._sockets.items()) if one.fileno() in ended])

    def _await(self, wanted: set[int], poll: "select.poll") -> float:
        """Register what connects peers that are not connected yet; return how long to wait."""
        if self._lose(wanted):
            return 0.0
        for connection in self._unnamed:
            poll.register(connection, select.POLLIN)
        for connection in list(self._connecting.values()):
            poll.register(connection, select.POLLOUT)
        if self._listener is not None and max(wanted) > self.rank:
            poll.register(self._listener, select.POLLIN)
        if not wanted - self._connecting.keys() or min(wanted) > self.rank:
            return _ASK_S
        pause_s = self._pause_s  # an address is awaited
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _lose(self, peers: Collection[int]) -> bool:
        """Look, at most once in a while, whether some of these, not connected yet, have ended."""
        if not peers or self._has_lost is None or time.monotonic() < self._asks_at_s:
            return False
        self._asks_at_s = time.monotonic() + _ASK_S
        lost = [peer for peer in peers if self._has_lost(peer)]
        self._mark(*lost)
        return bool(lost)

    def gone(self) -> tuple[int, ...]:
        """See Streams."""
        return tuple(self._gone)

    def close(self) -> None:
        """See Streams."""
        self._mark(*range(self.size))
        self.forget()

    def forget(self) -> None:
        """Close this process' copies of the connections, which in a forked child ends none."""
        listener = [] if self._listener is None else [self._listener]
        for one in [*listener, *self._unnamed, *self._connecting.values(), *self._sockets.values()]:
            one.close()
        self._sockets.clear()

    def __del__(self) -> None:
        self.forget()

    def _listen(self) -> None:
        host = _own_host(self._store)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(self.size)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        address = f"{self._token.hex()} {port} {host}"
        self._ask_store(lambda: self._store.set(self._key_of(self.rank), address))

    def _ask_store(self, step: Callable[[], object]) -> object:
        """Return what a step with the store does, False if somebody has ended with whom it went.

        Raises:
            PeerFailedError: the store is gone, and all that this rank knows of are there.
        """
        try:
            return step()
        except RuntimeError as error:
            others = [peer for peer in range(self.size) if peer != self.rank]
            for _ in range(round(_ASK_S / POLL_S)):
                self._asks_at_s = 0.0
                if self._lose(others):
                    return False
                time.sleep(POLL_S)
            raise PeerFailedError(
                f"the store in which the ranks of the group find each other is gone ({error}); its "
                "host, which is rank 0 or what launched the ranks, has ended"
            ) from error

    def _key_of(self, rank: int) -> str:
        return f"comm_collectives/streams/{self._key}/{rank}"

    def _connect(self, peer: int) -> socket.socket | None:
        """Go on connecting with a peer; its connection once there is one."""
        with self._opening:
            if peer in self._gone or peer in self._sockets:
                return self._sockets.get(peer)
            return self._accepted(peer) if peer > self.rank else self._connected(peer)

    def _mark(self, *peers: int) -> None:
        with self._opening:
            self._gone = {*self._gone, *peers}  # another thread may go through the old one

    def _accepted(self, peer: int) -> socket.socket | None:
        with suppress(BlockingIOError):
            while self._listener is not None:
                self._unnamed.append(self._listener.accept()[0])
        for connection in list(self._unnamed):
            hello = _hello_of(connection)
            if hello is not None:
                self._unnamed.remove(connection)
                self._name(connection, hello)
        return self._sockets.get(peer)

    def _name(self, connection: socket.socket, hello: bytes) -> None:
        token, rank = _HELLO.unpack(hello) if hello else (b"", -1)
        is_known = token == self._token and self.rank < rank < self.size
        if not is_known or rank in self._sockets:
            connection.close()
            return
        connection.recv(_HELLO.size)
        self._keep(rank, connection)

    def _connected(self, peer: int) -> socket.socket | None:
        connection = self._connecting.get(peer) or self._start(peer)
        if connection is None or not _is_writable(connection):
            return None
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._refused(peer, OSError(problem, os.strerror(problem)))
            return None
        del self._connecting[peer]
        token = bytes.fromhex(self._addresses[peer].split()[0])
        hello = _HELLO.pack(token, self.rank)
        try:
            is_told = connection.send(hello) == len(hello)
        except OSError:
            is_told = False
        self._keep(peer, connection)
        if not is_told:
            self._mark(peer)
        return connection

    def _start(self, peer: int) -> socket.socket | None:
        key = self._key_of(peer)
        if not self._ask_store(lambda: self._store.check([key])):
            return None
        self._addresses[peer] = self._store.get(key).decode()
        _, port, host = self._addresses[peer].split(" ", 2)
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            connection = self._connecting[peer] = socket.socket(found[0], socket.SOCK_STREAM)
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect(found[4])
        except OSError as error:
            self._refused(peer, error)
            return None
        return connection

    def _refused(self, peer: int, error: OSError) -> None:
        """A peer that listens no more is gone; anything else is a network that has to be put right.

        Raises:
            PeerFailedError: the peer cannot be reached.
        """
        connection = self._connecting.pop(peer, None)
        if connection is not None:
            connection.close()
        self._mark(peer)
        _, port, host = self._addresses[peer].split(" ", 2)
        is_here = _is_loopback(host) and not _is_loopback(_own_host(self._store))
        if is_here or not isinstance(error, ConnectionRefusedError | ConnectionResetError):
            raise PeerFailedError(
                f"rank {peer} of the group cannot be reached at {host} port {port} ({error}); "
                f"{_REMEDY}"
            ) from error

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection


def _hello_of(connection: socket.socket) -> bytes | None:
    """Return what an accepted connection said of itself: None so far, b"" if it has ended."""
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""
    return None if 0 < len(hello) < _HELLO.size else hello


def _is_writable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


def _own_host(store: Store) -> str:
    """Return the address at which the other ranks can reach this one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _host_of_interface(interface)
    with suppress(OSError):
        host = store_host(store)
        if host is not None:
            family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing, and finds the way
                own = str(probe.getsockname()[0])
            return (_way_out() or own) if _is_named_loopback(host, own) else own
    for host in (socket.gethostname(), "127.0.0.1"):
        with suppress(OSError):
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(found[0], socket.SOCK_STREAM) as probe:
                probe.bind(found[4][:2])
                return str(found[4][0])
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _is_named_loopback(host: str, own: str) -> bool:
    """Whether a machine's name means itself alone there, as in the hosts file of some systems."""
    return _is_loopback(own) and not _is_loopback(host) and host != "localhost"


def _way_out() -> str | None:
    """Return the address that this machine has for others, if it has a way to any."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # of nobody (RFC 5737); sends nothing
        return str(probe.getsockname()[0])
    return None


def _host_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        PeerFailedError: there is no such interface, or it has no address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _INTERFACE_ADDRESS, asked)[20:24])
    except OSError as error:
        raise PeerFailedError(
            f"GLOO_SOCKET_IFNAME={name!r} names no interface with an IPv4 address here ({error}); "
            f"{_REMEDY}"
        ) from error


def _after_fork() -> None:
    # A child would keep its parent's connections open beyond the parent's end.
    for streams in list(_OPEN):
        streams.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
