"""Messages between processes: one JSON object a line over a TCP connection that never blocks.

Small on purpose: the roll call and the heartbeat send a few hundred bytes now and then. A peer
that sends anything else (a line over 64 KiB, not UTF-8, not a JSON object) is cut off.
"""

import json
import select
import socket
from typing import Any

MOST_LINE = 64 * 1024
MOST_WAITING = 1024 * 1024
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 80_000}

Message = dict[str, Any]


class Gone(Exception):
    """The peer closed the connection, its host vanished, or it does not speak our language."""


class Link:
    """One end of a connection; a host that loses power or network is Gone after 80 s."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._incoming, self._outgoing, self._ended = b"", b"", False
        self._inbox: list[Message] = []
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # they are Linux's
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def push(self, message: Message | None = None) -> None:
        """Send a message, and what earlier calls could not; raises Gone.

        What the kernel does not take now waits for the next call.
        """
        if message is not None:
            self._outgoing += json.dumps(message).encode() + b"\n"
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            if len(self._outgoing) > MOST_WAITING:
                raise Gone("it reads nothing") from None
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def pull(self) -> list[Message]:
        """What has come; raises Gone once everything was given out and no more can come."""
        while not self._ended:
            try:
                got = self.socket.recv(MOST_LINE)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            self._incoming += got
            self._ended = not got
            if len(self._incoming) > MOST_LINE:
                break
        *lines, self._incoming = self._incoming.split(b"\n")
        if len(self._incoming) > MOST_LINE:
            raise Gone("a line is too long")
        if self._ended and not lines:
            raise Gone("the connection was closed")
        return [_parse(line) for line in lines]

    def next(self, seconds: float) -> Message | None:
        """The next message, waiting so long for it; None when none came. Raises Gone."""
        if not self._inbox:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            poll.poll(max(seconds, 0.0) * 1000)
            self._inbox += self.pull()
        return self._inbox.pop(0) if self._inbox else None

    def end(self) -> None:
        """Say that nothing more will be sent; what the peer still sends can be read."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def _parse(line: bytes) -> Message:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Gone("it does not speak JSON") from error
    if not isinstance(found, dict):
        raise Gone("it does not send objects")
    return found
