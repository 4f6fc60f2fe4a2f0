"""Curves over updates: TensorBoard's files in the run directory, or the user's own logger instead.

Only TensorBoard's message types and its record framing are used, on a plain file. Its EventFileWriter would start a
thread and, where TensorFlow is installed, import all of it to open a file. Nothing is imported before the first
point: 0.2 s, once, on rank 0.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evener.report.folder import RunFolder
from evener.report.text import clean


class Curves:
    """Takes points of curves; does nothing where `folder` is not active. No failure here ends a training: `folder` says
    and counts it. `logger` replaces TensorBoard: an object with `log(values, step)` (wandb's run), or such a function.
    """

    def __init__(self, folder: RunFolder, logger: Any = None) -> None:
        self._folder = folder
        self._send: Callable[[dict[str, float], int], Any] | None = getattr(logger, "log", logger)
        self._what = "the TensorBoard curves" if logger is None else "the logger's curves"
        self._file: _TensorBoardFile | None = None
        self._off = not folder.active

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """One point for each curve in `values`. Reads them: a value on a GPU is waited for; None is left out."""
        if self._off:
            return
        try:
            numbers = {name: float(value) for name, value in values.items() if value is not None}
            if self._send is None:
                self._open()
            if self._send is not None:
                self._send(numbers, step)
        except Exception as error:
            self._folder.failed(self._what, error)

    def close(self) -> None:
        self._off = True
        if self._file is not None:
            os.close(self._file.descriptor)
            self._file = None

    def _open(self) -> None:
        assert self._folder.path is not None, "an active folder has a path"
        try:
            self._file = _TensorBoardFile(self._folder.path)
            self._send = self._file.write
        except OSError:
            raise
        except Exception as error:  # not only ImportError: a protobuf that does not fit raises TypeError
            self._off = True
            why, then = f"tensorboard cannot be imported ({clean(error)})", "pip install -U tensorboard protobuf"
            if isinstance(error, ModuleNotFoundError) and error.name == "tensorboard":
                why, then = "tensorboard is not installed", 'pip install "evener[curves]"'
            self._folder.say(f"curves go to events.jsonl only: {why}; for TensorBoard's files: {then}")


class _TensorBoardFile:
    """One `events.out.tfevents.*` file, one write a point, so that a killed run loses nothing that was logged."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._good = 0  # bytes of whole records
        self._append(file_version="brain.Event:2")

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._append(step=step, summary=self._summary(value=values))

    def _append(self, **fields: Any) -> None:
        buffer = io.BytesIO()
        self._record_writer(buffer).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        # A reader stops at a torn record for good: what a full disk cut short is taken back before the next one.
        if os.fstat(self.descriptor).st_size != self._good:
            os.ftruncate(self.descriptor, self._good)
        written = os.write(self.descriptor, buffer.getbuffer())
        if written != buffer.tell():
            raise OSError(f"only {written} of {buffer.tell()} bytes were written")
        self._good += written
