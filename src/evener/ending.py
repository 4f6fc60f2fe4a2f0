"""The last moment of a process that used torch.distributed, for the rooms with torch and for the launcher's shim.

gloo's threads live as long as their process group object. One that still has a Python object to drop while the
interpreter goes away aborts the process, after a training that had finished. So they must end before Python does.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import warnings
from types import FunctionType
from typing import Any

# Modules of torch whose functions take the default group as a default argument, and so hold the one that existed when
# they were first imported (making any optimizer imports the first) until the interpreter is gone.
HOLDERS = (
    "torch.distributed.nn.functional",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.optim.zero_redundancy_optimizer",
)


def let_groups_go(*, destroy: bool) -> None:
    """Drops what keeps a process group alive, so that its threads end here. For atexit; raises nothing.

    Args:
        destroy: Also end the groups that still exist. Without it only groups that their owner has destroyed go.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not hasattr(dist, "is_initialized"):
        return
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if destroy and dist.is_initialized():
            dist.destroy_process_group()
        for function in _functions(HOLDERS):
            held = function.__defaults__ or ()
            if any(isinstance(value, dist.ProcessGroup) for value in held):
                # None means the same to all of them: the default group.
                function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in held)
    gc.collect()
    time.sleep(0.001)  # a thread that waits for the interpreter's lock gets it: what it had to drop is gone after this


def _functions(modules: tuple[str, ...]) -> list[FunctionType]:
    found = []
    for name in modules:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else []:
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            found += [member for member in members if isinstance(member, FunctionType)]
    return found
