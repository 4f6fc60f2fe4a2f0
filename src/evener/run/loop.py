"""The loops of a run: where it stands in its data, and what happens around and between its updates."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from evener.data import Cursor
from evener.dist import comm
from evener.engine import Update
from evener.errors import UsageError
from evener.run.batch import Batch
from evener.run.epoch import Epoch, Sums
from evener.run.predicted import compare
from evener.run.resume import mark_from, marks_of
from evener.run.stop import Stopped, stop_signals
from evener.run.words import schedule_lines

if TYPE_CHECKING:
    from evener.run.run import Run

_HOW_NOW = {"SIGINT": "; Ctrl-C again stops now", "SIGTERM": "; a second one stops now"}


class Loop:
    """Owns the position of a run; a loop goes on where the one before left off. Called on all ranks together."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cursor = Cursor()
        self.batches = 0  # used since the run began
        self.total: int | None = None  # updates (or batches) of the loop that runs now; None where nobody knows
        self.went_back = False  # by load(): the body's batch is of the time before
        self.until: int | None = None  # the epoch that it ends before, then
        self.sums = Sums()  # of the epoch
        self.epoch_rows = 0  # used of the epoch of the newest update
        self.left_out: list[tuple[int, int, str]] = []  # (update, row, error) of this rank, which rank 0 does not know
        self.stop_reason = ""
        self.ended = False
        self.error_before = uncaught()  # an older cell's, in a notebook

    def updates(self, updates: int | None, epochs: int | None) -> Generator[Update]:
        total = self._total(updates, epochs, "updates")
        return self._around(total, self._train(total))

    def over_batches(self, batches: int | None, epochs: int | None) -> Iterator[Batch]:
        total = self._total(batches, epochs, "batches")
        return self._around(total, self._feed(total))

    def epochs(self, epochs: int) -> Iterator[Epoch]:
        updates, run = self.updates(None, epochs), self.run
        try:
            while self.cursor.epoch < epochs:
                number = self.cursor.epoch
                if self.cursor.offset == 0 or self.sums.epoch != number:
                    self.sums = Sums(number)
                epoch = Epoch(number, self._until_epoch_ends(updates, number), self.sums)
                yield epoch
                for _ in epoch:  # a body that did not iterate (or broke off) still gets its epoch made
                    pass
                fields = {name: getattr(epoch, name) for name in ("updates", "loss", "metrics", "seconds")}
                run._out.folder.event("epoch", update=run.number - 1, epoch=number, rows=self.epoch_rows, **fields)
            for _ in updates:  # let the loop end in its own words
                pass
        finally:
            updates.close()  # after `break` the script's last epoch still holds it

    def _total(self, count: int | None, epochs: int | None, word: str) -> int | None:
        if (count is None) == (epochs is None):
            raise UsageError(f"{word}() takes exactly one of {word}= and epochs=.", fix=[f"run.{word}(epochs=10)"])
        for name, value in ((word, count), ("epochs", epochs)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: a whole number, at least 1.", fix=[f"run.{word}({name}=10)"])
        self.until = None
        if count is not None:
            return count
        left = [self.run.feed.updates_in(epoch) for epoch in range(self.cursor.epoch, epochs or 0)]
        if None in left:
            self.until = epochs
            return None
        return self.batches + sum(map(int, left)) - self.cursor.offset // self.run.config.global_batch_size  # type: ignore[arg-type]

    def _until_epoch_ends(self, updates: Iterator[Update], number: int) -> Iterator[Update]:
        while self.cursor.epoch == number:
            update = next(updates, None)
            if update is None:
                return
            yield update
        self.run._out.after_last()

    def _train(self, total: int | None) -> Iterator[Update]:
        for batch in self._feed(total):
            try:
                update = self.run.step(batch)
            except Exception:
                # The batch was not used: a script that catches the error and loops again gets it again.
                self.cursor, self.batches = batch.portion.cursor, self.batches - 1
                raise
            if update.epoch != self.sums.epoch:
                self.sums = Sums(update.epoch)
            self.sums.add(update)
            self._end_epochs()  # a schedule's epoch is over before the body sees its last update
            yield update

    def _goes_on(self, total: int | None) -> bool:
        return self.batches < total if total is not None else self.cursor.epoch < (self.until or 0)

    def _feed(self, total: int | None) -> Iterator[Batch]:
        """The batches up to number `total`; between two of them the requests (to stop, to save) are looked at."""
        run = self.run
        while self._goes_on(total):
            for target in run.engine.targets.values():
                target.schedule.build(total)  # anew, where load() went back to before it was made
            updates = None if total is None else total - self.batches
            epochs = None if self.until is None else self.until - self.cursor.epoch
            for portion in run._out.pulse.timed(run.feed.portions(self.cursor, updates=updates, epochs=epochs)):
                self._end_epochs()
                self.epoch_rows = portion.cursor.offset + portion.rows
                parts = [
                    (number, piece.rows, run._prepared(piece.batch, number, piece.rows))
                    for (number, _), piece in zip(run.engine.cut.numbered(portion.planned), portion.pieces)
                    if piece.rows
                ]
                for row, text in portion.skipped:
                    run._report("bad_row", run.number, {"row": row, "error": text})
                    self.left_out += [(run.number, row, text)] * (not run.is_main)
                # From here on the batch counts as used: its body may save.
                self.cursor, self.went_back = portion.next, False
                self.batches += 1
                yield Batch(portion, parts)
                run._out.after_last()
                if portion.ends_epoch:
                    self._gather_left_out()
                self._between()
                if self.cursor is not portion.next:
                    break  # the body called load(): read on from there
        self._gather_left_out()
        self._end_epochs()

    def _gather_left_out(self) -> None:
        """Rank 0 tells of rows that other ranks could not read: they have no events. Collective, with "skip"."""
        if self.run.config.on_bad_sample == "skip":
            every, self.left_out = comm.all_gather(self.left_out), []
            for rank, rows in enumerate(every if self.run.is_main else ()):
                for number, row, text in rows:
                    self.run._report("bad_row", number, {"row": row, "error": text, "rank": rank})

    def _end_epochs(self) -> None:
        """Schedules make the steps of the epochs that are over."""
        for target in self.run.engine.targets.values():
            while target.schedule.epochs < self.cursor.epoch:
                self.run.engine.settle()
                target.schedule.after_epoch()

    def _around(self, total: int | None, items: Iterator[Any]) -> Generator[Any]:
        """Schedules are built and shown, signals ask for a stop, and the end is written down."""
        run, engine = self.run, self.run.engine
        if run._closed:
            raise UsageError("this run is closed.", fix=["construct another Run", "or close it after the last loop"])
        console, folder = run._out.console, run._out.folder
        began, self.total, self.ended = time.perf_counter(), total, False
        steps, goes_on = None if total is None else total - self.batches, self._goes_on(total)
        for target in engine.targets.values():
            # A loop that a resume finds over was as long as it was then, not as this count of what is left says.
            target.schedule.build(total, same=goes_on and not run.saving.other_data)
        if goes_on and run.is_main:
            for line in schedule_lines(engine, steps, run.feed.updates_in(0)):
                console.say(line)
        run.saving.start(run.number)
        run._beat.begin()
        if run._watch is not None:
            run._watch.begin()
        try:
            with stop_signals(self._asked_by_signal):
                yield from items
            engine.settle()
            engine.meet()
            if run._watch is not None:
                run._watch.finish()
            self.ended, self.error_before = True, uncaught()
            run.profile.stop(run.path, run.rank)
            if goes_on:
                if run.config.save_every is not None:
                    self.save(run.number)
                else:
                    run.saving.compare_ranks()
                if run._plan.predicted and run.is_main:
                    pulse = run._out.pulse
                    line, peaks = compare(run._plan.predicted, run.device, pulse.updates, pulse.waited + pulse.stepped)
                    console.say(line)
                    folder.event("peak", update=run.number - 1, **peaks)
                seconds = time.perf_counter() - began
                folder.event("finish", update=run.number - 1, updates=run.number, seconds=seconds)
                run._out.say_goodput()
        except GeneratorExit:
            # `break`: the script decided that this is enough. After an exception in the body it is not (see close).
            self.ended, self.error_before = True, uncaught()
            raise
        finally:
            run._beat.end()
            run._out.finish_loop(self.total)

    def _asked_by_signal(self, name: str) -> None:
        self.run._out.console.say(f"{name}: stops after this update and saves" + _HOW_NOW.get(name, ""))
        self.run.stop(name)

    def _between(self) -> None:
        """The loop asked for more: what was requested is done now, on all ranks alike."""
        run = self.run
        if run._watch is not None:
            run._watch.between()
        stop, save = run.engine.agreed()
        if stop:
            reasons = [reason for reason in comm.all_gather(self.stop_reason) if reason]
            reason = reasons[0] if reasons else "a stop was asked for"
            self.save(run.number)
            run._out.folder.event("stop", update=run.number - 1, reason=reason)
            run._out.console.say(f"stopped after {run.number} updates ({reason}); start it again to continue")
            raise Stopped(reason)
        if run.is_main and run.saving.time_is_up():
            # Clocks differ between ranks: rank 0's decides, and the request travels with the next update.
            run.engine.asks_to_save = 1.0
        run.saving.landed()
        if save or run.saving.is_due(run.number):
            self.save(run.number, behind=True)

    def save(self, name: str | int, *, behind: bool = False) -> None:
        self._gather_left_out()
        position = {
            "cursor": [self.cursor.epoch, self.cursor.offset],
            "stream": marks_of(self.cursor, self.run.config.stream, self.run.world_size),
            "batches": self.batches,
            "epoch": self.sums.state_dict(),
            "epoch_updates": [self.sums.epoch, self.sums.updates],
        }
        self.run.saving.write(name, position, self.run.number, behind=behind)

    def restore(self, states: Mapping[str, Any]) -> None:
        position = self.run.saving.restore(states)
        epoch, offset = position["cursor"]
        self.cursor = Cursor(epoch, offset, mark_from(position, self.run.rank, self.run.world_size))
        self.batches, self.went_back = position["batches"], True
        of, updates = position["epoch_updates"]
        if of != self.sums.epoch:  # else an `Epoch` may be holding them
            self.sums = Sums(of)
        self.sums.load_state_dict(position["epoch"])
        self.sums.updates = updates


def uncaught() -> BaseException | None:
    """The exception that nothing caught: of the script, or of an earlier cell of a notebook."""
    return getattr(sys, "last_value", None)
