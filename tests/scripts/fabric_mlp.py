"""A small lightning.fabric script."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4))
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    print(f"done rank {fabric.global_rank} of {fabric.world_size}", flush=True)


if __name__ == "__main__":
    main()
