"""The files that a command will write: looked at before its work, so that minutes of it are not lost at the end."""

from __future__ import annotations

import os
from pathlib import Path

from smpar.errors import CommandError


def require_writable(option: str, path: str | None) -> None:
    """Whether a file can be written there, or there is none to write; nothing is.

    Raises:
        CommandError: its folder is missing, it is a folder, or either may not be written.
    """
    if path is None:
        return
    file = Path(path)
    where = file if file.exists() else file.parent
    if not file.parent.is_dir():
        found = f"no folder {str(file.parent)!r}"
    elif not path or file.is_dir():
        found = f"{path!r} is a folder"
    elif not os.access(where, os.W_OK) or os.statvfs(file.parent).f_flag & os.ST_RDONLY:
        found = f"{str(where)!r} may not be written"
    else:
        return
    raise CommandError(f"{option} names a file that can be written", found, f"{option} with another path")
