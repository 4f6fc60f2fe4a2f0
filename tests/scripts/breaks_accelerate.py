"""accelerate's own launcher for two CPU processes, of which one breaks in the way that the first argument says."""

import os
import signal
import sys

import torch
from accelerate import Accelerator, debug_launcher

how = sys.argv[1]


def main():
    accelerator = Accelerator(cpu=True)
    both = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
    both.forward = lambda x: both["used"](x) if how == "unused" else both["used"](x) + both["unused"](x)
    model, optimizer = accelerator.prepare(both, torch.optim.SGD(both.parameters(), lr=0.1))
    for step in range(3):
        if accelerator.process_index == 1 and step == 1 and how == "raises":
            raise KeyError("labels of row 17")
        if accelerator.process_index == 1 and step == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(model(torch.randn(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    debug_launcher(main, num_processes=2)
