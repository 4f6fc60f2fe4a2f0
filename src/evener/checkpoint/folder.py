"""The checkpoints of one run: numbered by update, the newest few kept, and named ones that stay."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.checkpoint import store
from evener.checkpoint.agree import on_all, on_main
from evener.checkpoint.behind import Behind
from evener.checkpoint.manifest import check, read_manifest
from evener.errors import CheckpointError, UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_NUMBERED = re.compile(r"update-(0|[1-9][0-9]*)")


class Checkpoints:
    """A folder of checkpoints, written by rank 0 and read by every rank; `keep` numbered ones stay, and all named ones.

    A run that was taken back writes low numbers again: its first one puts an end to those beyond the update it went
    back to (`reached`). They are removed once it is on the disk; until then the order of writing tells which they are.

    Every method, the constructor included, is called on all ranks with the same arguments. What rank 0 did or why it
    failed is told to all (one broadcast of JSON; the others wait in it): they go on together or raise the same error.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r}: how many checkpoints stay is an integer of at least 1.")
        self.folder = Path(os.path.abspath(folder))
        self.keep = keep
        self.behind = Behind()
        self.reached: int | None = None  # update of the newest numbered one written or restored
        self._order: int | None = None  # of the newest one written; unknown until something is
        on_main(self._start)

    def path(self, which: int | str) -> Path:
        """The directory of update `which`, or of the checkpoint with that name. No communication."""
        if isinstance(which, int) and not isinstance(which, bool) and which >= 0:
            return self.folder / f"update-{which}"
        if not isinstance(which, str) or not _NAME.fullmatch(which) or _NUMBERED.fullmatch(which):
            fix = ['letters, digits, "_", "-" and ".", not "." or "-" first; update-<number> is taken by numbers']
            raise UsageError(f"{which!r} cannot be the name of a checkpoint.", fix=fix)
        return self.folder / which

    def save(self, which: int | str, states: Mapping[str, Any] | None, about: Mapping[str, Any]) -> list[str]:
        """Write one; after a numbered one remove those beyond `keep`. Returns notes to show: what could not be removed.

        which: The update's number, or a name; an existing one is replaced.
        states, about: See `store.write`; only rank 0's states are written, other ranks may pass None.

        Raises:
            CheckpointError: on all ranks; the checkpoints that were there are still there.
        """
        path = self.path(which)

        def act() -> list[str]:
            if isinstance(which, str):
                store.write(path, states or {}, about=about)
                return []
            store.write(path, states or {}, about=self._next(about))
            return self._prune(which)

        return on_main(act)

    def begin(self, which: int, states: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """`save`, written behind the training: returns when rank 0 has copied the state to its host.

        `behind.outcome` of rank 0 tells later whether it is on the disk: ask for it before the next `begin` or `save`.

        Raises CheckpointError on all ranks, for a state that cannot be held.
        """
        path = self.path(which)

        def act() -> None:
            tree, tensors = store.encoded(states, about)
            kept = self.behind.copied(tensors)
            ordered = self._next(about)

            def write() -> list[str]:
                store.put(path, tree, kept, ordered)
                return self._prune(which)

            self.behind.start(write)

        on_main(act)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest numbered checkpoint that is whole, every byte checked (by rank 0), or None.

        Newest is the highest number, without those that a lower one, written later, puts an end to. Also notes to show:
        each newer one that is refused, with the reason.
        """

        def act() -> tuple[str | None, list[str]]:
            notes: list[str] = []
            for path in self._valid():
                try:
                    check(path)
                except CheckpointError as error:
                    notes.append(f"checkpoint {path.name} is refused: {error.cause}")
                else:
                    return str(path), [*notes, *[f"checkpoint {path.name} is used instead" for _ in notes[:1]]]
            return None, [*notes, *["no earlier checkpoint is there" for _ in notes[:1]]]

        path, notes = on_main(act)
        return Path(path) if path else None, notes

    def load(self, path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(states, about), read and checked by every rank from its own view of the disk; see `store.read`."""
        return on_all(lambda: store.read(path))

    def _start(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in store.leftovers(self.folder):
                store.recover(self.folder / name)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot hold checkpoints: {error.strerror or error}.") from error

    def _numbered(self) -> list[Path]:
        """Highest first."""
        found = [path for path in self.folder.iterdir() if path.is_dir() and _NUMBERED.fullmatch(path.name)]
        return sorted(found, key=_number, reverse=True)

    def _valid(self) -> list[Path]:
        """`_numbered` without those that a lower number, written later, put an end to: a kill came before the removal.
        One whose manifest cannot be read stays, to be refused by name.
        """
        valid, latest = [], 0
        for path in reversed(self._numbered()):
            order = _order_of(path)
            if order is None or order >= latest:
                valid.append(path)
                latest = latest if order is None else order
        return valid[::-1]

    def _next(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """`about` with its place in the order of writing."""
        if self._order is None:
            self._order = max((_order_of(path) or 0 for path in self._numbered()), default=0)
        self._order += 1
        return {**about, "order": self._order}

    def _prune(self, written: int) -> list[str]:
        last = written if self.reached is None else min(self.reached, written)
        self.reached = written
        others = [path for path in self._numbered() if _number(path) != written]
        abandoned = [path for path in others if _number(path) > last]
        notes = []
        for path in abandoned + [path for path in others if path not in abandoned][self.keep - 1 :]:
            try:
                store.remove(path)
            except OSError as error:
                notes.append(f"checkpoint {path.name} could not be removed: {error.strerror or error}")
        return notes


def _number(path: Path) -> int:
    return int(path.name.removeprefix("update-"))


def _order_of(path: Path) -> int | None:
    """Its place in the order of writing; 0 where it was written without one; None: its manifest cannot be read."""
    try:
        order = read_manifest(path)["about"].get("order", 0)
    except CheckpointError:
        return None
    return order if isinstance(order, int) else None
