"""What the fork server imports once, so that every worker process has it in memory from its first moment.

Only imports: an operation here would start OpenMP's threads, and a process with threads must not fork.
"""

from __future__ import annotations

import contextlib

import torch
import torch._dynamo  # the first optimizer step of a process would import it otherwise: a second for each worker
import torch._subclasses.fake_tensor
import torch.distributed

with contextlib.suppress(ImportError):
    import smpar.api  # noqa: F401

__all__ = ["torch"]
