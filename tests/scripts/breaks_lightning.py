"""Lightning on two CPU processes, of which one breaks in the way that the first argument says."""

import os
import signal
import sys

import lightning as L
import torch

how = sys.argv[1]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1 and how == "raises":
            raise KeyError("labels of row 17")
        if self.global_rank == 1 and index == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.used(batch[0]).mean()
        return loss if how == "unused" else loss + self.unused(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


rows = torch.utils.data.TensorDataset(torch.randn(32, 4))
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False
)
trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))
