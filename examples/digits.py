"""The classic network on real digits. Run it with: evener run --nproc 2 --cpu examples/digits.py

scikit-learn's handwritten digits (1,797 images of 8x8) by default; `--mnist DIR` reads the original MNIST files
(train-images-idx3-ubyte and so on, plain or .gz) from a directory.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import evener


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def idx(path):
    """An IDX file: two zero bytes, a type byte, the number of dimensions, their sizes, then the values."""
    path = path if path.exists() else path.with_name(path.name + ".gz")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return torch.tensor(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes))


def mnist(folder):
    def part(name):
        images, labels = idx(folder / f"{name}-images-idx3-ubyte"), idx(folder / f"{name}-labels-idx1-ubyte")
        return images.float() / 255, labels.long()

    return part("train"), part("t10k")


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    hits = (logits.argmax(1) == labels).sum()
    return F.cross_entropy(logits, labels), {"accuracy": evener.Mean(total=hits, count=len(labels))}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, help="directory with the four MNIST files")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dir", help="the run directory (default: runs/digits)")
    parser.add_argument("--exact", action="store_true", help="equal to the last bit on any number of processes")
    args = parser.parse_args()

    evener.seed(0)
    train, test = mnist(args.mnist) if args.mnist else digits()
    size = train[0][0].numel()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(size, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    keywords = {"global_batch_size": args.batch, "max_grad_norm": 1.0, "dir": args.dir, "exact": args.exact}
    run = evener.Run(model, optimizer, loss_fn, train, **keywords)
    for epoch in run.epochs(args.epochs):
        for _update in epoch:
            pass
        if epoch.number % 10 == 9:
            run.print(epoch)
    accuracy = run.evaluate(test)["accuracy"]
    run.print(f"test accuracy {100 * accuracy:.1f} %")
    if args.exact:
        run.print(run.digest())
    run.print(f"curves: tensorboard --logdir {run.dir}")
    run.close()


if __name__ == "__main__":
    main()
