"""Steps of changing lengths leave nothing behind: the bench in a short form."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT


@pytest.mark.parametrize(("few", "many"), [(5, 0), (0, 140)])
def test_changing_lengths_leave_nothing_behind(few: int, many: int) -> None:
    """Few lengths, and more than there are programs kept: no more tensors and threads than before, else it fails."""
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "soak", "--steps", "200"]
    done = subprocess.run(
        [*command, "--few", str(few), "--many", str(many)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["growth_bytes_per_step"] < 50_000 and figures["slowdown"] < 3
