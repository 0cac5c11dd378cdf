"""Hidden states in slices of the sequence, and how work on heads or channels is entered and left.

    whole   [N, S, H]
    slice   [N, 1, s, H]           s = S / tp; the dim of size 1 is this rank's place in [N, tp, s, H]
            [N, 1, 1, s, H]        S = s * tp - 1: one position of padding at the end of the last rank
            [N, 1, 1, 1, s, H]     two

So the number of dims tells a slice, and the length of the whole: on any pipeline stage, in a recomputation, under fake
tensors, without a word from elsewhere; and code that would take a slice for the whole fails. Norms, dropout and sums
between regions do not care about dims. (arXiv 2205.05198, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpar.nn import collectives
from smpar.nn.group import TensorGroup


def is_slice(hidden: Tensor) -> bool:
    """Whether a hidden state is a slice of the sequence."""
    return hidden.dim() > 3


def _padded(hidden: Tensor, group: TensorGroup) -> tuple[Tensor, int]:
    """A whole hidden state whose sequence divides, and how many positions that took."""
    padding = -hidden.shape[1] % group.size
    return (F.pad(hidden, (0, 0, 0, padding)) if padding else hidden), padding


def _mark(part: Tensor, padding: int) -> Tensor:
    """[N, s, H] as a slice."""
    return part.reshape(part.shape[0], *[1] * (1 + padding), *part.shape[1:])


def _unmark(hidden: Tensor, group: TensorGroup) -> tuple[Tensor, int]:
    """[N, s, H] of a slice, and the length of the whole sequence."""
    part = hidden.reshape(hidden.shape[0], *hidden.shape[-2:])
    return part, part.shape[1] * group.size - (hidden.dim() - 4)


def to_slice(hidden: Tensor, group: TensorGroup) -> Tensor:
    """This rank's slice of a hidden state that is whole on every rank; of a slice, itself."""
    if is_slice(hidden) or group.size == 1:
        return hidden
    padded, padding = _padded(hidden, group)
    return _mark(collectives.take(padded, group, 1), padding)


def to_whole(hidden: Tensor, group: TensorGroup) -> Tensor:
    """The whole hidden state of slices, for work that all ranks do alike; of a whole one, itself."""
    if not is_slice(hidden):
        return hidden
    part, length = _unmark(hidden, group)
    return collectives.whole(part, group, 1)[:, :length].contiguous()


def leave(addend: Tensor, group: TensorGroup) -> Tensor:
    """The end of a region: of the ranks' addends [N, S, H] the sum, or in memory mode a slice of it."""
    if group.size == 1:
        return addend
    if not group.memory:
        return collectives.reduce(addend, group)
    padded, padding = _padded(addend, group)
    return _mark(collectives.reduce_scatter(padded, group, 1), padding)


@contextmanager
def entered(hidden: Tensor, group: TensorGroup) -> Iterator[Tensor]:
    """The beginning of a region; gives the whole hidden state [N, S, H].

    What is gathered from slices is not kept for the backward inside, but gathered again there.
    """
    if group.size == 1:
        yield hidden
    elif not is_slice(hidden):
        yield collectives.copy(hidden, group)
    else:
        part, length = _unmark(hidden, group)
        whole = collectives.gather(part, group, 1)[:, :length].contiguous()
        if (
            not torch.is_grad_enabled()
            or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        ):
            yield whole
            return
        again = Regather(part.detach(), whole, group)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            yield whole


class Regather:
    """Keeps a slice where autograd would keep the gathered tensor, or views of it.

    What it keeps goes through the hooks around it, if there are any: those of a checkpoint or an offload, too.
    """

    def __init__(self, part: Tensor, whole: Tensor, group: TensorGroup) -> None:
        self._group, self._length = group, whole.shape[1]
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        around, back = hooks or (_same, _same)
        self._around: Callable[[Tensor], Any] = around
        self._back: Callable[[Any], Tensor] = back
        self._part: Any = part
        self._kept: Any = None  # the slice, as the hooks around keep it
        self._storage, self._version = whole.untyped_storage()._cdata, whole._version
        self._packed = 0  # tensors that are kept as the slice, and were not asked for since
        self._gathered: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What is kept for a tensor."""
        if tensor.untyped_storage()._cdata != self._storage or tensor._version != self._version:
            return None, self._around(tensor)
        if self._part is not None:
            collectives.will_gather(self._part, self._group)
            self._kept, self._part = self._around(self._part), None
        self._packed += 1
        return (tensor.shape, tensor.stride(), tensor.storage_offset()), None

    def unpack(self, kept: Any) -> Tensor:
        """The tensor, of what was kept."""
        view, other = kept
        if view is None:
            return self._back(other)
        if self._gathered is None:
            gathered = collectives.all_gathered(self._back(self._kept), self._group, 1)
            self._gathered = gathered[:, : self._length].contiguous()
        tensor = self._gathered.as_strided(*view)
        self._packed -= 1
        if self._packed <= 0:  # the last one: nobody asks again, unless the graph is kept
            self._gathered = None
        return tensor


def _same(kept: Any) -> Any:
    return kept
