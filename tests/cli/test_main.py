"""The command `smpar`: finds its commands, starts fast, and says what is wrong without a traceback."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from smpar.cli.main import COMMANDS, INTERRUPTED, WRONG, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f"usage: smpar {name}")
    assert importlib.import_module(f"smpar.cli.{name}").__doc__


def test_the_list_of_commands_needs_no_torch() -> None:
    code = "import sys, smpar.cli.main as m\ntry: m.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in COMMANDS)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "smpar", "prob"], capture_output=True, text=True, check=False)
    assert done.returncode == WRONG and "invalid choice: 'prob'" in done.stderr and "probe" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_is_no_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"smpar.cli.{name}"), "run", interrupted)
    needed = {"plan": ["--cluster", "p4d", "--global-batch", "8"], "profile": ["m:f"], "simulate": ["plan.json"]}
    assert main([name, *needed.get(name, [])]) == INTERRUPTED
    assert capsys.readouterr().err == f"smpar {name}: interrupted\n"
