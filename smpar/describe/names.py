"""Many module names in few words.

blocks.0 blocks.1 blocks.2 norm            blocks.0-2, norm
h.0.attn h.0.mlp h.1.attn                  h.0, h.1.attn        (if h.0 has no other parts)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def compress(names: Sequence[str], others: Iterable[str] = ()) -> str:
    """Join names, parents standing for all their parts and ranges for what is numbered in sequence.

    Args:
        names: of modules, in the order in which they are to be told.
        others: names of modules that are not among them, so that no parent of theirs may stand for both.
    """
    return ", ".join(_ranges(_parents(list(names), list(others))))


def _parents(names: list[str], others: list[str]) -> list[str]:
    """Replace all parts of a module by the module, where every part is here."""
    abroad = {prefix for name in others for prefix in _prefixes(name)}
    result: dict[str, None] = {}
    for name in names:
        own = [p for p in _prefixes(name) if p not in abroad]
        # The root, "", says nothing; a container of everything would not either.
        short = next((p for p in own if sum(_within(n, p) for n in names) > 1 and not _numbered_parts(names, p)), name)
        result.setdefault(short)
    return list(result)


def _prefixes(name: str) -> list[str]:
    """The names of a module's parents and its own, outermost first: ``h``, ``h.0``, ``h.0.attn``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def _numbered_parts(names: list[str], parent: str) -> bool:
    """Whether the parts are told better by their numbers."""
    depth = parent.count(".") + 1
    return any(_within(n, parent) and n != parent and n.split(".")[depth].isdigit() for n in names)


def _ranges(names: list[str]) -> list[str]:
    """Join neighbours that differ in one number which counts up."""
    result: list[str] = []
    run: list[list[str]] = []

    def end() -> None:
        if run:
            at = _differing(run[0], run[-1])
            first = list(run[0])
            if at is not None:
                first[at] = f"{run[0][at]}-{run[-1][at]}"
            result.append(".".join(first))
            run.clear()

    for parts in (n.split(".") for n in names):
        if not _follows(run, parts):
            end()
        run.append(parts)
    end()
    return result


def _follows(run: list[list[str]], parts: list[str]) -> bool:
    if not run or (at := _differing(run[-1], parts)) is None:
        return False
    same_place = len(run) == 1 or _differing(run[0], run[-1]) == at
    return same_place and run[-1][at].isdigit() and parts[at].isdigit() and int(parts[at]) == int(run[-1][at]) + 1


def _differing(a: list[str], b: list[str]) -> int | None:
    """The only place in which two names differ, if there is just one."""
    if len(a) != len(b):
        return None
    places = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    return places[0] if len(places) == 1 else None
