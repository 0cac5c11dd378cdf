"""The TCP connections behind gloo groups: found when groups are made, cut when a rank fails.

gloo has no way to cancel a wait: `abort` and `shutdown` of its process groups do nothing, and a thread blocked in
C++ sees neither signals nor Python exceptions. What does wake it, at both ends and at once, is the end of a
connection. So the connections that came up while groups were made are remembered by their pair of addresses (not
by descriptor: numbers are reused), and `cut` shuts them down from whichever thread notices the failure.

Where there is no ``/proc/self/fd`` nothing is found; peers then wake when this process exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

TABLE = "/proc/self/fd"
ESTABLISHED = 1

Ends = tuple[Any, Any]


def _connections() -> Iterator[tuple[Ends, socket.socket]]:
    """This process's connected sockets, each as (own address, peer's address) and a duplicate to act on."""
    try:
        names = os.listdir(TABLE)
    except OSError:
        return
    for name in names:
        try:
            if not os.readlink(f"{TABLE}/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since the listing
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                ends = (copy.getsockname(), copy.getpeername())
            except OSError:  # not connected
                continue
            yield ends, copy


class Connections:
    """The connections that come up inside ``with connections.recording():``."""

    def __init__(self) -> None:
        self._ends: frozenset[Ends] = frozenset()

    @contextlib.contextmanager
    def recording(self, but_port: int = -1) -> Iterator[None]:
        """Remembers what is connected at the end and was not at the start; ``but_port`` is the store's, left alone."""
        before = {ends for ends, _ in _connections()}
        yield
        new = {ends for ends, _ in _connections()} - before
        self._ends |= {ends for ends in new if but_port not in (ends[0][1], ends[1][1])}

    def __len__(self) -> int:
        return len(self._ends)

    def broken(self) -> bool:
        """Whether any of them has ended: evidence that some peer's process is gone."""
        alive = {
            ends
            for ends, copy in _connections()
            if ends in self._ends and copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        }
        return len(alive) < len(self._ends)

    def cut(self) -> int:
        """Ends all of them, waking whoever waits at either end; returns how many there were."""
        count = 0
        for ends, copy in _connections():
            if ends in self._ends:
                with contextlib.suppress(OSError):  # the peer was faster
                    copy.shutdown(socket.SHUT_RDWR)
                count += 1
        return count
