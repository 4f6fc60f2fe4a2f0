"""A model of many equal blocks, from traces of the same model with few of them: what one block does is repeated.

The step walks over the blocks (the forward up, the backward down, an optimizer's lists up), so the events of a trace
fall into groups, one for each block that is passed. The middle block's groups are repeated, up or down as the walk
goes, and a storage dies as many blocks after its birth as it did there. Sizes that depend on the number of blocks (a
list's sum) are affine in it. Before that is believed it must turn the trace of K blocks into the one of K + 1, event
by event.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evener.errors import UsageError
from evener.plan.memory import Slope, difference, kind, moved
from evener.plan.values import Alloc, Event, Free, Trace

_Key = tuple[int, int, int]  # block, which of its groups, position in it


@dataclass
class _Group:
    """Events [start, stop) in which one block is at work; block -1: none."""

    block: int
    start: int
    stop: int
    phase: str
    number: int = 0  # among the groups of this block


def deeper(few: Trace, more: Trace, path: str, count: int) -> Trace:
    """The trace of `count` blocks more than `few` has. `more` has one more, `path` is that of the blocks' list.

    Raises:
        UsageError: the blocks do not do the same.
    """
    walk = _Walk(few, path)
    events, sources, _ = walk.longer(1, {})
    if _shape(events) != _shape(more.events):
        raise UsageError(f"the blocks of {path} are not passed alike: each is traced.")
    slopes = {i: slope for i, one, other in zip(sources, events, more.events) if (slope := difference(one, other))}
    events, _, updates = walk.longer(count, slopes)
    blocks = walk.last + 1
    note = f"{blocks} and {blocks + 1} blocks of {path} were traced; {blocks + count} repeat what one of them does"
    return replace(few, events=tuple(events), updates=updates, how="extrapolated", notes=(*few.notes, note))


class _Walk:
    def __init__(self, trace: Trace, path: str) -> None:
        self.events, self.updates, self.path = trace.events, trace.updates, path
        index = re.compile(rf"{re.escape(path)}\.(\d+)(\.|$)")
        block_of = functools.cache(lambda module: int(found[1]) if (found := index.match(module)) else -1)
        owners: dict[int, int] = {}
        labels: list[int] = []
        here, past = -1, ""
        for event in self.events:
            if event.phase != past:
                here, past = -1, event.phase
            if isinstance(event, Alloc):
                owners[event.id] = here = block_of(event.module)
            label = here
            if isinstance(event, Free) and (event.phase not in ("forward", "backward") or here < 0):
                label = here if 0 <= here <= owners[event.id] + 1 else owners[event.id]
            labels.append(label)
        self.last = max(labels)
        self.middle = self.last // 2
        groups: list[_Group] = []
        for i, (event, block) in enumerate(zip(self.events, labels)):
            last = groups[-1] if groups else None
            if last is not None and (last.block, last.phase) == (block, event.phase) and i not in self.updates:
                last.stop = i + 1
            else:
                groups.append(_Group(block, i, i + 1, event.phase))
        self.groups = self._joined(groups)
        self.births: dict[int, _Key] = {}
        seen: dict[int, int] = {}
        for group in self.groups:
            group.number = seen[group.block] = seen.get(group.block, -1) + 1
            for i in range(group.start, group.stop):
                event = self.events[i]
                if isinstance(event, Alloc):
                    self.births[event.id] = (group.block, group.number, i - group.start)

    def _joined(self, groups: list[_Group]) -> list[_Group]:
        """What happens between two blocks in a row belongs to the first of them."""
        found: list[_Group] = []
        for i, group in enumerate(groups):
            before, after = found[-1] if found else group, groups[i + 1] if i + 1 < len(groups) else group
            between = group.block < 0 <= min(before.block, after.block) and before.phase == group.phase == after.phase
            if between and abs(after.block - before.block) <= 1:
                group.block = before.block
            same = before is not group and (before.block, before.phase) == (group.block, group.phase)
            if same and group.start not in self.updates:
                found[-1].stop = group.stop
            else:
                found.append(group)
        return found

    def longer(self, count: int, slopes: dict[int, Slope]) -> tuple[list[Event], list[int], tuple[int, int]]:
        """Events with `count` blocks more, where each comes from, and where the updates begin."""
        events: list[Event] = []
        sources: list[int] = []
        updates: list[int] = []
        numbers: dict[_Key, int] = {}
        fresh = itertools.count()

        def born(id: int, block: int, shift: int) -> _Key:
            """Whose death it is, in a group of `block` that was moved up by `shift`."""
            of, number, position = self.births[id]
            if of >= 0:
                near = block >= 0 and abs(of - block) <= 1
                of += shift if near else count if of > self.middle else 0
            return of, number, position

        def copy(group: _Group, shift: int) -> None:
            for i in range(group.start, group.stop):
                event = self.events[i]
                if i in slopes:
                    event = moved(event, (slopes[i], float(count)))
                if isinstance(event, Alloc):
                    key = (group.block + shift, group.number, i - group.start)
                    numbers[key] = next(fresh)
                    module = event.module
                    if shift:
                        old, new = f"{self.path}.{group.block}", f"{self.path}.{group.block + shift}"
                        module = new + module.removeprefix(old) if module.startswith(old) else module
                    event = replace(event, id=numbers[key], module=module)
                elif isinstance(event, Free):
                    event = replace(event, id=numbers.pop(born(event.id, group.block, shift)))
                events.append(event)
                sources.append(i)

        try:
            for at, group in enumerate(self.groups):
                updates += [len(events)] * self.updates.count(group.start)
                if group.block != self.middle:
                    copy(group, count if group.block > self.middle else 0)
                    continue
                up = self._goes_up(at)
                for shift in range(count + 1) if up else range(count, -1, -1):
                    copy(group, shift)
        except KeyError:
            raise UsageError(f"the blocks of {self.path} are not passed alike: each is traced.") from None
        return events, sources, (updates[0], updates[1])

    def _goes_up(self, at: int) -> bool:
        middle, blocks = self.middle, [-1, *(group.block for group in self.groups), -1]
        before, after = blocks[at], blocks[at + 2]
        if after == middle + 1 or before == middle - 1:
            return True
        if after == middle - 1 or before == middle + 1:
            return False
        raise KeyError(at)


def _shape(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Events without sizes; deaths at one moment in the order of births."""
    numbers: dict[int, int] = {}
    shape: list[tuple[Any, ...]] = []
    dead: list[int] = []
    for event in events:
        if isinstance(event, Free):
            dead.append(numbers[event.id])
            continue
        shape += [("free", number) for number in sorted(dead)]
        shape.append(kind(event))
        dead = []
        if isinstance(event, Alloc):
            numbers[event.id] = len(numbers)
    return shape + [("free", number) for number in sorted(dead)]
