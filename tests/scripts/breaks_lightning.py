"""Lightning on two CPU processes, which break in the way that the first argument says."""

import sys

import lightning as L
import torch
import ways

how = sys.argv[1]


class Model(L.LightningModule):
    def __init__(self, groups=1):
        super().__init__()
        self.model, self.groups = ways.Model(how), groups

    def training_step(self, batch, index):
        x, y = batch
        ways.in_the_step(how, self.global_rank, index, x)
        if how == "shapes":
            self.trainer.strategy.reduce(torch.ones(4 + 4 * self.global_rank))
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return ways.optimizer(self.model, self.groups)


def trainer(**limits):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **limits)


resumed = None
if how in ("disk", "torn", "optimizer"):
    first = trainer(max_steps=1)
    first.fit(Model(groups=2 if how == "optimizer" else 1), ways.loader(how))
    resumed = "small/last.ckpt" if how == "disk" else "last.ckpt"
    first.save_checkpoint(resumed)
    if how == "torn" and first.is_global_zero:
        ways.tear(resumed)
    first.strategy.barrier()
trainer(max_epochs=1).fit(Model(), ways.loader(how), ckpt_path=resumed)
