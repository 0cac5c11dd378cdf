"""``python -m smpar``: the same as the command ``smpar``."""

from __future__ import annotations

import sys

from smpar.cli.main import main

sys.exit(main())
