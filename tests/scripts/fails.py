"""Rank 1 raises in the middle of training; rank 0 then loses its peer and raises too."""

import datetime

import torch
import torch.distributed as dist


def load(row: int) -> torch.Tensor:
    if row == 2 and dist.get_rank() == 1:
        raise ValueError(f"bad row {row}")
    return torch.ones(1)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    try:
        for row in range(4):
            print("row", row, flush=True)
            dist.all_reduce(load(row))
    finally:
        if dist.get_rank() == 1:
            # Cleaning up fails as well, and hides the first error.
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


if __name__ == "__main__":
    main()
