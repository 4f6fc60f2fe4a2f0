"""What a progress bar asks: is there a terminal, and how wide. Then waits for a change of its size."""

import os
import signal
import sys
import time

resized = []
signal.signal(signal.SIGWINCH, lambda signum, frame: resized.append(1))
rank = os.environ["RANK"]
print(f"rank {rank} tty {sys.stdout.isatty()} {sys.stderr.isatty()}", flush=True)
if sys.stdout.isatty():
    print("columns", os.get_terminal_size().columns, flush=True)
    until = time.monotonic() + 20
    while not resized and time.monotonic() < until:
        time.sleep(0.01)
    print("columns", os.get_terminal_size().columns, flush=True)
print("\x1b[2K\rbar 100%", end="\n", file=sys.stderr, flush=True)
