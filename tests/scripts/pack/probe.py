"""Prints what a program sees of itself, as JSON: a script by path, a module with `-m pack.probe`."""

import atexit
import json
import multiprocessing
import os
import pickle
import sys
import threading


class Local:
    """Defined in the script: pickling needs `__main__` to be this module."""

    def __init__(self, value: int) -> None:
        self.value = value


def double(local: Local) -> Local:
    return Local(2 * local.value)


def main() -> None:
    seen = {
        "argv": sys.argv,
        "path0": sys.path[0],
        "names": sorted(name for name in globals() if name not in ("__annotations__", "__conditional_annotations__")),
        "file": globals().get("__file__"),
        "name": __name__,
        "package": __package__,
        "spec": __spec__ and __spec__.name,
        "loader": getattr(__loader__, "path", None),
        "main_is_this": sys.modules["__main__"].__dict__ is globals(),
        "pickled": pickle.loads(pickle.dumps(Local(3))).value,  # noqa: S301  (its own bytes)
        "excepthook_is_default": sys.excepthook is sys.__excepthook__,
        "threads": threading.active_count(),
        "torch_imported": "torch" in sys.modules,
        "evener_imported": "evener" in sys.modules,
    }
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            seen[method] = pool.apply(double, (Local(21),)).value
    atexit.register(lambda: print("at exit:", double(Local(1)).value, len(pickle.dumps(Local(1))) > 0, flush=True))
    rank = os.environ.get("RANK", "0")
    print(f"probe {rank} {json.dumps(seen)}", flush=True)
    print(f"on standard error {rank}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
