"""evener: the global batch is the contract.

Names resolve on first use, so that `import evener` (and every room that works without torch) stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.errors import EvenerError

__version__ = "0.1.0"

# name -> where it lives. One table: the public face, and what `dir(evener)` shows.
_WHERE = {
    "Run": "evener.run",
    "Update": "evener.engine",
    "Epoch": "evener.run",
    "Stopped": "evener.run",
    "blank": "evener.dist.blank",
    "save": "evener.checkpoint",
    "load": "evener.checkpoint",
    "Engine": "evener.engine",
    "Mean": "evener.engine",
    "device": "evener.dist.device",
    "pick_gpus": "evener.gpus.pick",
    "seed": "evener.dist.info",
    "rank": "evener.dist.info",
    "world_size": "evener.dist.info",
    "first": "evener.dist.first",
    "spawn": "evener.dist.spawn",
    "comm": "evener.dist",
    "memory": "evener.dist.memory",
    "explain_error": "evener.explain",
    "make_plan": "evener.run.capture",
}

__all__ = ["EvenerError", "__version__", *_WHERE]  # noqa: PLE0604  the lazy names are strings too

if TYPE_CHECKING:
    from evener.checkpoint import load as load
    from evener.checkpoint import save as save
    from evener.dist import comm as comm
    from evener.dist.blank import blank as blank
    from evener.dist.device import device as device
    from evener.dist.first import first as first
    from evener.dist.info import rank as rank
    from evener.dist.info import seed as seed
    from evener.dist.info import world_size as world_size
    from evener.dist.memory import memory as memory
    from evener.dist.spawn import spawn as spawn
    from evener.engine import Engine as Engine
    from evener.engine import Mean as Mean
    from evener.engine import Update as Update
    from evener.explain import explain_error as explain_error
    from evener.gpus.pick import pick_gpus as pick_gpus
    from evener.run import Epoch as Epoch
    from evener.run import Run as Run
    from evener.run import Stopped as Stopped
    from evener.run.capture import make_plan as make_plan


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        from evener.errors import nearest

        close = nearest(name, __all__)
        hint = f" Did you mean evener.{close}?" if close else ""
        raise AttributeError(f"module 'evener' has no attribute {name!r}.{hint}")
    import gc
    import importlib

    # A full collection over torch's objects would take longer than the import that sets it off.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(where), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value  # the next use costs nothing
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
