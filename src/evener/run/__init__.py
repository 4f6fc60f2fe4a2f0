"""Room `run`: the user's evening. `Run` composes data, engine, dist and report; it owns nothing that they own."""

from evener.run.epoch import Epoch as Epoch
from evener.run.run import Run as Run

__all__ = ["Epoch", "Run"]
