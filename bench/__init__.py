"""Paired comparisons: evener against the loop one would write by hand, accelerate, lightning.fabric and torchrun.

`python -m bench` prints one table per part; `python -m bench step gpt --quick` a part of them. The only place, apart
from tests, where other training libraries are imported.
"""
