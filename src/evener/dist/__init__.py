"""Room `dist`: who this process is, the lifetime of the process group, and collectives with stated semantics.

Rank information is read once, at the edge (`info.here()`), and passed as a value from there on.
"""

from evener.dist import comm as comm
from evener.dist.group import Group as Group
from evener.dist.info import Place as Place
from evener.dist.info import here as here

__all__ = ["Group", "Place", "comm", "here"]
