"""A small Lightning Trainer script."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mlp(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mlp(), data)
    environment = type(trainer.strategy.cluster_environment).__name__
    print(f"done rank {trainer.global_rank} of {trainer.world_size} in {environment}", flush=True)


if __name__ == "__main__":
    main()
