"""Sleeping kernels: a clock that all processes of a machine share, and a sleep that does not let delays add up.

asked for     |0F0    |0F1    |0F2    |
woken up at           ' |     '  |    ' |        each sleep ends some 60 us late, and later on a busy machine
moments       |       |       |       |          yet kernel follows kernel, as on a device's queue
"""

from __future__ import annotations

import contextlib
import os
import time

LATE = 0.002
"""Seconds that a process may wake up, or a message come, after its time without that counting as a delay."""


def be_prompt() -> None:
    """Ask the system to wake this process's threads before ordinary ones, where it may ask that (as root, on Linux).

    Processes that only sleep take little from others so. Among busy ones, it wakes them up in 0.1 ms instead of 10.
    """
    with contextlib.suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def now() -> float:
    """Seconds of the machine's monotonic clock, which its processes share."""
    return time.monotonic()


def reach(moment: float) -> float:
    """Sleep until a moment.

    A device starts what is queued when it is free, whenever its host wakes up. So do these kernels, within `LATE`; a
    process that comes later than that is late, as is all that follows.

    Returns:
        That moment; or now, if it was left behind by more than `LATE`.
    """
    rest = moment - time.monotonic()
    if rest > 0:
        time.sleep(rest)
    here = time.monotonic()
    return moment if here - moment <= LATE else here
