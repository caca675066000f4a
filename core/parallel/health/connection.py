"""Messages between processes: one JSON object per line over a TCP connection that never blocks.

Registration and heartbeats send a few hundred bytes now and then. A peer that breaks the protocol
(a line over 64 KiB, not UTF-8, not a JSON object) is disconnected.
"""

import contextlib
import json
import select
import socket
from typing import Any

MAX_LINE_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 1024 * 1024
# seconds until the first probe, between probes; number of probes; milliseconds without an
# acknowledgement: together a host that loses power or network is noticed after 80 s
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 80_000}

Message = dict[str, Any]


class PeerDisconnected(Exception):
    """The peer closed the connection, its host vanished, or it broke the protocol."""


class Connection:
    """One end of a connection; raises PeerDisconnected 80 s after a host has vanished."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._incoming, self._outgoing, self._at_end = b"", b"", False
        self._inbox: list[Message] = []
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # only Linux has all of them
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Message | None = None) -> None:
        """Send a message after what earlier calls could not send; raises PeerDisconnected.

        What the kernel does not accept now waits for the next call.
        """
        if message is not None:
            self._outgoing += json.dumps(message).encode() + b"\n"
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            if len(self._outgoing) > MAX_UNSENT_BYTES:
                raise PeerDisconnected("it does not read what is sent to it") from None
        except OSError as error:
            raise PeerDisconnected(error.strerror or str(error)) from error

    def receive(self) -> list[Message]:
        """The messages that have arrived; raises PeerDisconnected once no more can arrive."""
        while not self._at_end:
            try:
                received = self.socket.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self._incoming += received
            self._at_end = not received
            if len(self._incoming) > MAX_LINE_BYTES:  # parse first: the sender may be endless
                break
        # what follows the last newline is the beginning of a line that is still to come
        *lines, self._incoming = self._incoming.split(b"\n")
        if len(self._incoming) > MAX_LINE_BYTES:
            raise PeerDisconnected("protocol error: a line is too long")
        if self._at_end and not lines:
            raise PeerDisconnected("the connection was closed")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise PeerDisconnected("protocol error: a line is not JSON") from error
        if not all(isinstance(message, dict) for message in messages):
            raise PeerDisconnected("protocol error: a line is not a JSON object")
        return messages

    def next_message(self, seconds: float) -> Message | None:
        """The next message, or None if none arrives within `seconds`; raises PeerDisconnected."""
        if not self._inbox:
            # poll, because select refuses file descriptors of 1024 and more
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            poll.poll(max(seconds, 0.0) * 1000)
            self._inbox += self.receive()
        return self._inbox.pop(0) if self._inbox else None

    def finish_sending(self) -> None:
        """Announce that nothing more will be sent; what the peer still sends can be read."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class WakeSocket:
    """A pair of sockets that wakes a thread waiting in a selector."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)

    def wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):
            self._other.send(b"!")

    def clear(self) -> None:
        """Be ready for the next `wake`."""
        with contextlib.suppress(OSError):
            self.socket.recv(64)

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self._other.close()
