"""Room `run`: the user's evening. `Run` composes data, engine, dist and report; it owns nothing that they own."""

from evener.run.batch import Batch as Batch
from evener.run.epoch import Epoch as Epoch
from evener.run.run import Run as Run
from evener.run.stop import Stopped as Stopped

__all__ = ["Batch", "Epoch", "Run", "Stopped"]
