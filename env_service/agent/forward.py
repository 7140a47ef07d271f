"""The one way out: 127.0.0.1:port inside, to the data plane's unix socket. Bytes only; nothing is understood here."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable

_BUFFER_BYTES = 256 * 1024
_CONNECT_RETRY_S = 0.01
_CONNECT_LIMIT_S = 5.0


class Forwarder:
    """Listen on loopback and join each connection with one to the socket."""

    def __init__(self, selector: selectors.BaseSelector, port: int, target: str, most: int) -> None:
        self._selector = selector
        self._target = target
        self._most = most
        self._links: set[_Link] = set()
        self._waiting: list[tuple[socket.socket, float]] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self._listener.setblocking(False)
        self._listening = False
        self._listen(on=True)

    def _listen(self, *, on: bool) -> None:
        if on and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not on:
            self._selector.unregister(self._listener)
        self._listening = on

    def _accept(self, _mask: int) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # the client is gone again, or no file is left: the next turn tries again
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._join(client, time.monotonic() + _CONNECT_LIMIT_S)

    def _join(self, client: socket.socket, until: float) -> None:
        try:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            client.close()
            return
        server.setblocking(False)
        try:
            server.connect(self._target)
        except OSError as error:
            server.close()
            # A unix socket whose queue is full says EAGAIN and does not wait.
            if error.errno == errno.EAGAIN and time.monotonic() < until:
                self._waiting.append((client, until))
            else:
                client.close()
            return
        self._links.add(_Link(self._selector, client, server, self._forget))
        self._listen(on=len(self._links) + len(self._waiting) < self._most)

    def _forget(self, link: "_Link") -> None:
        self._links.discard(link)
        self._listen(on=True)

    def tick(self) -> float | None:
        """Try again what had to wait; say how soon to come back."""
        waiting, self._waiting = self._waiting, []
        for client, until in waiting:
            self._join(client, until)
        return _CONNECT_RETRY_S if self._waiting else None


class _Way:
    """One direction: what was read from `source` and is not yet written to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = bytearray()
        self.ended = False
        self.closed = False

    def pull(self) -> None:
        data = self.source.recv(65536)
        self.buffer += data
        self.ended = not data

    def push(self) -> None:
        if self.buffer:
            with contextlib.suppress(BlockingIOError):
                del self.buffer[: self.sink.send(self.buffer)]
        if self.ended and not self.buffer and not self.closed:
            self.closed = True
            self.sink.shutdown(socket.SHUT_WR)


class _Link:
    """A client's connection and ours to the proxy."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        client: socket.socket,
        server: socket.socket,
        done: Callable[["_Link"], None],
    ) -> None:
        self._selector = selector
        self._done = done
        self._ways = (_Way(client, server), _Way(server, client))
        self._masks = {client: 0, server: 0}
        self._interest()

    def _interest(self) -> None:
        out, back = self._ways
        for sock, reading, writing in ((out.source, out, back), (back.source, back, out)):
            mask = 0
            if not reading.ended and len(reading.buffer) < _BUFFER_BYTES:
                mask |= selectors.EVENT_READ
            if writing.buffer:
                mask |= selectors.EVENT_WRITE
            self._watch(sock, mask)

    def _watch(self, sock: socket.socket, mask: int) -> None:
        before = self._masks[sock]
        if mask == before:
            return
        self._masks[sock] = mask
        if not before:
            self._selector.register(sock, mask, lambda mask, sock=sock: self._event(sock, mask))
        elif not mask:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, mask, self._selector.get_key(sock).data)

    def _event(self, sock: socket.socket, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                for way in self._ways:
                    if way.source is sock and not way.ended:
                        with contextlib.suppress(BlockingIOError):
                            way.pull()
            for way in self._ways:
                way.push()
        except OSError:
            self._close()
            return
        if all(way.closed for way in self._ways):
            self._close()
        else:
            self._interest()

    def _close(self) -> None:
        for sock in self._masks:
            self._watch(sock, 0)
            sock.close()
        self._done(self)


def most_connections() -> int:
    """Say how many connections leave enough files for commands."""
    return max(64, (os.sysconf("SC_OPEN_MAX") - 256) // 4)
