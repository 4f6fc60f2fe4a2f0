"""accelerate on two CPU processes, which break in the way that the first argument says.

Under torchrun; started alone it starts two processes by accelerate's own `debug_launcher`.
"""

import os
import sys

import torch
import ways
from accelerate import Accelerator, debug_launcher

how = sys.argv[1]


def main():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = ways.Model(how)
    model, optimizer, loader = accelerator.prepare(model, ways.optimizer(model), ways.loader(how))
    if how in ("disk", "torn", "optimizer"):
        accelerator.save_state("small" if how == "disk" else "state")
        if accelerator.is_main_process and how == "torn":
            ways.tear("state/model.safetensors")
        if accelerator.is_main_process and how == "optimizer":
            other = ways.optimizer(accelerator.unwrap_model(model), groups=2)
            torch.save(other.state_dict(), "state/optimizer.bin")
        accelerator.wait_for_everyone()
        accelerator.load_state("state")
    for step, (x, y) in enumerate(loader):
        ways.in_the_step(how, rank, step, x)
        if how == "shapes":
            accelerator.reduce(torch.ones(4 + 4 * rank))
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main() if "RANK" in os.environ else debug_launcher(main, num_processes=2)
