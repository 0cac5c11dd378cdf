"""The door to the compiled core."""

from __future__ import annotations

from types import ModuleType

from smpar.errors import NativeMissing


def core() -> ModuleType:
    """`smpar._native`; its functions are described in ``smpar/_native.pyi``.

    Raises:
        NativeMissing: smpar was not installed, only found.
    """
    try:
        import smpar._native as native  # `from smpar import` would ask smpar for its API first, and load torch
    except ImportError as error:
        raise NativeMissing("the planner needs smpar's compiled core", str(error), "run: pip install -e .") from error
    return native
