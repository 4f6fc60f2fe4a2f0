"""Room `engine`: one update. What it computes is in step.py; how it is spread over devices is in spread/."""

from evener.engine.engine import Engine as Engine
from evener.engine.mean import Mean as Mean
from evener.engine.update import Update as Update

__all__ = ["Engine", "Mean", "Update"]
