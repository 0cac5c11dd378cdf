"""The caller's side of an emulation: a host process, asked for steps. Imports no torch; neither has to be loaded here.

::

    steps = emulate(emulation, steps=3)             one emulation

    with Emulator() as emulator:                    many, for the price of one import of torch
        for emulation in emulations:
            steps = emulator.run(emulation)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from smpar.emulate.emulation import Emulation, Step
from smpar.emulate.job import Failure, Job
from smpar.emulate.predict import predicted
from smpar.errors import EmulationError, EmulationFailed

START = 60.0  # s that starting the host and its ranks may take on a busy machine
SLOWER = 10.0  # times the predicted duration that the steps may take
_ROOT = Path(__file__).resolve().parents[2]
_HOST = "import sys; from smpar.emulate.host import serve; serve(int(sys.argv[1]))"


class Emulator:
    """Executes emulations on this machine, one after the other. Close it, or use it in a ``with``."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._conn = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-c", _HOST, str(theirs.fileno())],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is the caller's, who then ends them all
            )

    @property
    def pid(self) -> int:
        """The host's process; its children are the ranks, while they run."""
        return self._process.pid

    def run(self, emulation: Emulation, steps: int = 3, limit: float | None = None) -> tuple[Step, ...]:
        """Execute some steps.

        Args:
            emulation: what to execute.
            steps: how many, at least one.
            limit: seconds that this may take; None: a minute, and ten times what is predicted.

        Raises:
            EmulationError: less than one step.
            EmulationFailed: a process failed, or they were not done in time; all have ended.
        """
        if steps < 1:
            raise EmulationError("at least one step is executed", f"{steps=}", "steps=3")
        if limit is None:
            limit = START + SLOWER * steps * predicted(emulation).seconds
        try:
            self._conn.send(Job(emulation, steps, limit))
            result: tuple[Step, ...] | Failure = self._conn.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise _failed("the host of the ranks", f"ended with exit code {code}") from error
        except BaseException:
            self.close()  # an interrupt: what is under way has no reader any more
            raise
        if isinstance(result, Failure):
            raise _failed(result.who, result.what)
        return result

    def close(self) -> None:
        """End the host, and with it all ranks. Idempotent."""
        self._conn.close()
        self._process.kill()  # the ranks see that, and end themselves
        self._process.wait()

    def __enter__(self) -> Emulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def emulate(emulation: Emulation, steps: int = 3) -> tuple[Step, ...]:
    """Execute some steps of an emulation by local processes, one per rank and replica, over gloo.

    The processes sleep through their kernels, so there may be many more of them than cores: 16 on two, with kernels of
    10 ms and more. Where they may, they ask the system to wake them before others, in its class for real time.

    Args:
        emulation: what to execute.
        steps: how many, at least one.

    Returns:
        Each step; `fastest` is the one to compare with `predicted`.

    Raises:
        EmulationError: less than one step.
        EmulationFailed: a process failed, or they were not done in time; all have ended.
    """
    with Emulator() as emulator:
        return emulator.run(emulation, steps)


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SMPAR_"))}
    path = os.pathsep.join(p for p in (str(_ROOT), kept.get("PYTHONPATH", "")) if p)
    # Where no name server answers, torch waits for one at every address that it connects to.
    return {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }  # fmt: skip


def _failed(who: str, what: str) -> EmulationFailed:
    found = "\n".join("    | " + line for line in what.splitlines())
    return EmulationFailed(
        "all processes of an emulation go on to its end",
        f"{who}\n{found}",
        "see above; with too little memory or too many processes, emulate fewer ranks",
    )
