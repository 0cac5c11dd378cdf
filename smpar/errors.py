"""Every mistake a user can make has a class here: the rule, the values at hand, what to change."""

from __future__ import annotations


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
