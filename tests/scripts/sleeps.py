"""Every rank forks a child, as a data loader does, then waits. Standard library only."""

import os
import signal
import sys
import time

if os.fork() == 0:
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)
if "--stubborn" in sys.argv and os.environ["RANK"] == "0":
    signal.signal(signal.SIGINT, lambda signum, frame: print("not now", flush=True))
if "--ask" in sys.argv:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(75))
print(f"rank {os.environ['RANK']} sleeps", flush=True)
if "--die" in sys.argv and os.environ["RANK"] == "1":
    how = sys.argv[-1]
    time.sleep(0.3)
    if how == "exit":
        sys.exit(7)
    if how.isdecimal():
        os._exit(int(how))
    os.kill(os.getpid(), getattr(signal, how))
while True:
    time.sleep(0.05)
