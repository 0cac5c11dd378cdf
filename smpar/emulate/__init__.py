"""A step of a plan, predicted and then executed for real by local processes whose kernels sleep.

Emulation ──predicted──▶ Step            who does what when, by the simulator
    └───────emulate────▶ Step, Step      the same, as processes did it over gloo

Where the two differ by more than what a loaded machine adds, the simulator, the schedule or the channels are wrong.
"""

from smpar.emulate.emulation import Emulation, Step, Tied, fastest
from smpar.emulate.predict import predicted
from smpar.emulate.processes import Emulator, emulate

__all__ = ["Emulation", "Emulator", "Step", "Tied", "emulate", "fastest", "predicted"]
