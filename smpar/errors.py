"""Every mistake a user can make has a class here: the rule, the values at hand, what to change."""

from __future__ import annotations

from typing import Any


class SmparError(RuntimeError):
    """Base of all errors that smpar raises on purpose.

    Args:
        rule: what must hold.
        values: what was found instead, with the numbers or names at hand.
        fix: what to change; ends in code to paste where that is possible.
    """

    def __init__(self, rule: str, values: str, fix: str) -> None:
        super().__init__(f"{rule}\n  found: {values}\n  to fix: {fix}")
        self.rule, self.values, self.fix = rule, values, fix

    def __reduce__(self) -> tuple[type[SmparError], tuple[str, str, str]]:
        return type(self), (self.rule, self.values, self.fix)


class ProgramError(SmparError):
    """A pipeline program contradicts itself: a flow names a segment that is not there, or runs against program order."""


class ScheduleError(SmparError):
    """A schedule cannot run its program: an action is missing, doubled, misplaced, or waits for ever."""


class ScheduleNameError(SmparError):
    """No schedule has the name that was asked for."""


class PlanError(SmparError):
    """No plan keeps the limits given, or the numbers given to the planner mean nothing."""


class TooFewUnits(PlanError):
    """More pipeline stages are asked for than there are units to put on them."""


class NativeMissing(SmparError):
    """The planner's compiled core is not there."""


    def __reduce__(self) -> tuple[type[SmparError], tuple[str, str, str], dict[str, Any]]:
        return type(self), (self.rule, self.values, self.fix), self.__dict__.copy()


class ConfigError(SmparError):
    """A key of ``smpar.init``'s configuration is unknown, of a wrong type, or out of range."""


class NotBuiltYet(ConfigError):
    """A key asks for something that this version does not do; refused rather than ignored."""


class MeshError(SmparError):
    """The world's size and the parallel degrees do not fit together, or a rank is outside the world."""


class NotInitialized(SmparError):
    """Something needs ``smpar.init`` to have run."""


class CommError(SmparError):
    """A transfer could not be done: a connection broke, or a message's address makes no sense."""


class PeerFailed(SmparError):
    """Another rank failed, so this one stops too.

    Attributes:
        rank: global rank of the first rank that failed; -1 if it could not be told.
        trace: that rank's traceback; empty if it died without leaving one.
    """

    def __init__(self, rule: str, values: str, fix: str, rank: int = -1, trace: str = "") -> None:
        super().__init__(rule, values, fix)
        self.rank, self.trace = rank, trace
