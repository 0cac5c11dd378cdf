"""What the caller and the host of an emulation tell each other. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from smpar.emulate.emulation import Emulation


@dataclass(frozen=True)
class Job:
    """What the caller asks for.

    Attributes:
        emulation: what to execute.
        steps: how often.
        limit: seconds after which it is given up.
    """

    emulation: Emulation
    steps: int
    limit: float


@dataclass(frozen=True)
class Failure:
    """Why there is no result.

    Attributes:
        who: the rank that failed first.
        what: its traceback, or how it ended.
    """

    who: str
    what: str
