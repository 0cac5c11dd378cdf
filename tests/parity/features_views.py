"""Features: memory that several tensors see, and writes into it, also those that bring its first gradient.

autograd knows views of one tensor, and what is written into one of them reaches the others' gradients, too. An alias
that `detach` made has the same values, but gradients of its own:

    s = c(x).detach()     v = s[:, 1:3]     a = s.detach()     k of an earlier stage, with a gradient
    s.add_(k)             v has the gradient of k, a has not; both have its values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.features import W, feature
from tests.parity.features_values import linear


class Fork(nn.Module):
    """A view, an alias without gradient, and another view of one tensor that stays inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x) * 1.0
        return h[:, 1:6], h.detach(), h[:, 3:]


class Part(nn.Module):
    """A view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 2:]


class Views(nn.Module):
    """On four stages: a fork | b r | c f | d."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.r, self.f, self.fork = nn.ReLU(inplace=True), Part(), Fork()


def views(body: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
    """Register a forward of `Views`."""
    name = "".join(word.capitalize() for word in body.__name__.split("_"))
    feature("a fork b r c f d d", degrees=(2, 4), name=name, **options)(type(name, (Views,), {"forward": body}))


def refused(body: Callable[[Any, Tensor], Tensor]) -> None:
    """What torch refuses, too, if the tensor is of the same stage."""
    views(body, refused="BlindView")


def quiet(m: Views, x: Tensor) -> Tensor:
    """A tensor of c's stage without gradient."""
    return m.c(x).detach() * 0.5


def wide(part: Tensor, start: int = 1) -> Tensor:
    return F.pad(part, (start, W - start - part.shape[-1]))


# -- the first gradient ---------------------------------------------------------------------------


@views
def through_the_base(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s[:, 1:3]
    s.add_(k, alpha=1.2)
    return wide(v) + 0.1


@views
def through_a_view(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s[:, 1:3]
    v.add_(k[:, 1:3])
    return s * 2


@views
def through_another_view(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v, w = s[:, :4], s[:, 2:]
    v.add_(k[:, :4])
    return wide(w, 2) + 0.1


@views
def through_a_view_of_a_view(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s.view(-1, 2, 4)
    w, u = v[:, 1], v.transpose(1, 2)
    w.add_(k[:, :4])
    return m.d(u.reshape(-1, W)) + wide(w, 0)


@views
def to_a_view_of_a_view(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s.view(-1, 2, 4)[:, 1]
    s[:, 2:] += k[:, 2:]
    return wide(v, 4) + 0.1


@views
def whose_base_is_gone(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v, w = s[:, 1:5], s[:, 3:]
    del s
    w.add_(k[:, :5])
    return m.b(wide(v))


@views
def within_a_segment(m: Any, x: Tensor) -> Tensor:
    """The gradient has arrived before; what a later stage sees of it comes after."""
    k = m.a(x)
    s = m.c(k).detach() * 0.5
    v = s[:, 1:3]
    s.add_(k)
    return m.d(wide(v)) + m.b(wide(v))


@views
def before_and_after(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s[:, 1:5]
    seen = m.d(wide(v))
    s.add_(k)
    w = s[:, 3:]
    again = m.d(wide(v))
    w.add_(m.b(k)[:, 3:])
    v.mul_(0.7)
    return seen + again + wide(v) + wide(w, 3)


@views
def twice(m: Any, x: Tensor) -> Tensor:
    s = quiet(m, x)
    v = s[:, 1:3]
    s.add_(m.a(x))
    late = m.d(s + wide(v))
    v.add_(m.b(late)[:, 1:3])
    return wide(v) + s


@views
def of_a_tensor_that_asks_for_it(m: Any, x: Tensor) -> Tensor:
    s = quiet(m, x).requires_grad_(True)
    v = s[:, 1:3]
    t = s * 1.0
    u = t[:, :2]
    t.add_(m.a(x))
    return wide(u) + m.d(wide(v))


# -- more gradients, or none ----------------------------------------------------------------------


@views
def a_second_gradient(m: Any, x: Tensor) -> Tensor:
    """Only a view hands on what was written into its base."""
    s, k = m.c(x) * 0.5, m.a(x)
    v = s[:, 1:3]
    s.add_(k)
    return wide(v) + 0.1


@views
def a_second_gradient_within_a_segment(m: Any, x: Tensor) -> Tensor:
    k = m.a(x)
    s = m.c(x) * 0.5
    v = s[:, 1:3]
    s.add_(k)
    return m.d(wide(v))


@views
def written_without_gradient(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v = s[:, 1:3]
    with torch.no_grad():
        v.add_(k[:, 1:3])
    s.mul_(k)
    return wide(v) + s


@views
def views_without_gradient(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    with torch.no_grad():
        v = s[:, 1:3]
    before = m.d(wide(v))
    s.add_(k)
    return m.d(s) + before


@views
def views_without_gradient_of_what_has_one(m: Any, x: Tensor) -> Tensor:
    s, k = m.c(x) * 0.5, m.a(x)
    with torch.no_grad():
        v = s[:, 1:3]
    before = m.d(wide(v)) + m.b(wide(v)) + wide(v)
    s.add_(k)
    return m.d(s) + before


@views
def views_without_gradient_used_without(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    with torch.no_grad():
        v = s[:, 1:5]
        w = v[:, 1:]
    s.add_(k)
    with torch.no_grad():
        late = m.d(wide(v)) + wide(w)
    late = late + wide(v.detach())
    s.add_(m.b(x))
    with torch.no_grad():
        later = wide(v) + m.b(wide(w))
    return m.d(s) + late + later


@refused
def views_without_gradient_used_with(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    with torch.no_grad():
        v = s[:, 1:3]
    s.add_(k)
    return m.d(s) + wide(v)


@refused
def views_of_views_without_gradient_written(m: Any, x: Tensor) -> Tensor:
    s, k = m.c(x) * 0.5, m.a(x)
    with torch.no_grad():
        v = s[:, 1:5]
    w = v[:, 1:]
    s.mul_(2)
    w.add_(k[:, :3])
    return s


@refused
def asked_for_a_gradient_after_it_was_viewed(m: Any, x: Tensor) -> Tensor:
    s = quiet(m, x)
    v = s[:, 1:3]
    s.requires_grad_(True)
    return m.d(wide(v))


# -- aliases --------------------------------------------------------------------------------------


@views
def an_alias_stays_without(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    alias = s.detach()
    s.add_(k)
    return m.d(s + 0) + alias


@views
def an_alias_is_written(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    alias = s.detach()
    alias.add_(k)
    return m.d(s) + alias * 2


@views
def an_alias_with_other_gradients(m: Any, x: Tensor) -> Tensor:
    s, k = m.c(x) * 0.5, m.a(x)
    alias = s.detach()
    alias.add_(k)
    return m.d(s + 0) + alias * 2


@views
def views_of_an_alias(m: Any, x: Tensor) -> Tensor:
    s, k = m.c(x) * 0.5, m.a(x)
    v, w = s[:, 2:6], s.detach()[:, 1:5]
    u = w[:, :2]
    s.add_(k)
    w.mul_(2).add_(m.b(x)[:, 1:5])
    return wide(u) + wide(v, 2) * 3


# -- several views at once ------------------------------------------------------------------------


@views
def chunks_of_what_is_written(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    p, q = s.chunk(2, -1)
    before = wide(p + q, 0)
    s.add_(k)
    del p
    return m.d(s + 0) + before


@views
def chunks_without_gradient(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x).detach()
    p, q = s.chunk(2, -1)
    rows = s.unbind(1)
    part, _ = s.split([3, 5], 1)
    s.add_(k)
    return wide(p, 0) + wide(q, 4) * m.d(s) + rows[2].unsqueeze(1) + wide(part)


# -- tensors that every rank has ------------------------------------------------------------------


@views
def into_plain_tensors(m: Any, x: Tensor) -> Tensor:
    s = torch.zeros_like(x)
    s.add_(m.c(x))
    v = s[:, 1:3]
    s.add_(m.a(x))
    return m.d(wide(v))


def into_viewed_plain_tensors(m: Any, x: Tensor) -> Tensor:
    s = torch.zeros_like(x)
    v = s[:, 1:3]
    s.add_(m.a(x))
    return m.d(wide(v) + s)


def into_aliased_plain_tensors(m: Any, x: Tensor) -> Tensor:
    s = torch.zeros_like(x)
    v = s.detach()
    s.add_(m.a(x))
    return m.d(v + s)


views(into_viewed_plain_tensors, refused="WriteIntoReplicated")
views(into_aliased_plain_tensors, refused="WriteIntoReplicated")


# -- programs that nobody knows beforehand --------------------------------------------------------


@views
def where_values_decide(m: Any, x: Tensor) -> Tensor:
    s, k = quiet(m, x), m.a(x)
    v, alias = s[:, 1:5], s.detach()
    if float(k.detach().abs().max()) >= 0:
        s.add_(k)
    w = v[:, 1:]
    w.add_(m.b(x)[:, :3])
    m.r(v)
    return m.d(wide(v) + alias) + wide(w)


# -- units and memory -----------------------------------------------------------------------------


@views
def a_unit_writes(m: Any, x: Tensor) -> Tensor:
    """On an earlier stage than what it writes."""
    s = m.c(x) * 0.5
    v = s[:, 1:3]
    m.r(s)
    return wide(v) + s


@views
def a_unit_of_a_later_stage_writes(m: Any, x: Tensor) -> Tensor:
    s = m.a(x) * 0.5
    v = s[:, 1:3]
    m.r(s)
    return wide(v) + m.d(s)


@views
def a_unit_views_what_arrives(m: Any, x: Tensor) -> Tensor:
    s = m.b(x) * 0.5
    v = m.f(s)
    v.add_(m.a(x)[:, :6])
    return s + m.d(wide(v, 2))


@views
def a_unit_views_what_is_written(m: Any, x: Tensor) -> Tensor:
    s = m.b(x) * 0.5
    v = m.f(s)
    s.add_(m.a(x))
    return m.d(wide(v, 2))


@views
def a_unit_gives_views(m: Any, x: Tensor) -> Tensor:
    v, alias, w = m.fork(x)
    k = m.b(x)
    v.add_(k[:, :5])
    w.mul_(1.5)
    late = m.d(wide(v))
    alias.add_(m.a(late))
    return late + alias + wide(w, 3) * 2
