"""Which device this process uses: chosen or checked, and explained when it cannot be."""

from __future__ import annotations

import os

import torch

from evener.dist.info import here
from evener.errors import DeviceError


def device(spec: str | int | torch.device | None = None) -> torch.device:
    """The device for this process, checked.

    None takes the GPU whose slot is the local rank, else Apple's MPS (one process), else the CPU. A number is a slot:
    a position inside CUDA_VISIBLE_DEVICES, not the number that nvidia-smi shows.

    No communication. Makes no CUDA context (memory on a GPU is touched by the first tensor).

    Raises:
        DeviceError: the device does not exist here, or several processes would share what cannot be shared.
    """
    place = here()
    if spec is None:
        if torch.cuda.is_available():
            return _cuda(place.local_rank, f"local rank {place.local_rank}")
        if torch.backends.mps.is_available() and place.world_size == 1:
            return torch.device("mps")
        return torch.device("cpu")
    if isinstance(spec, bool) or not isinstance(spec, str | int | torch.device):
        raise DeviceError(f"device({spec!r}) is no device.", fix=['"cpu", "cuda:0", "mps", or a slot number'])
    if isinstance(spec, int):
        return _cuda(spec, f"slot {spec}")
    try:
        wanted = torch.device(spec)
    except RuntimeError:
        raise DeviceError(f"device {spec!r} is not known.", fix=['"cpu", "cuda", "cuda:0" or "mps"']) from None
    if wanted.type == "cuda":
        return _cuda(place.local_rank if wanted.index is None else wanted.index, str(wanted))
    if wanted.type == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceError("device 'mps' is not available: this is no Apple GPU, or torch was built without it.")
        if place.world_size > 1:
            raise DeviceError(
                f"MPS works for one process; this job has {place.world_size}.",
                fix=["evener run --nproc 1", "or --cpu for several processes"],
            )
        return wanted
    if wanted.type == "cpu":
        return torch.device("cpu")
    raise DeviceError(f"device {str(wanted)!r} is not supported.", fix=["cpu, cuda or mps"])


def _cuda(slot: int, asked: str) -> torch.device:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            why = f"this torch ({torch.__version__}) was built without CUDA"
            fix = ["install a CUDA build of torch", 'or use device "cpu" (evener run --cpu)']
        elif visible is not None and visible.strip() in ("", "-1"):
            why = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
            fix = ["unset CUDA_VISIBLE_DEVICES", 'or use device "cpu" (evener run --cpu)']
        else:
            why = "torch finds no usable GPU (no driver, or no permission)"
            fix = ["nvidia-smi shows whether the driver works", 'or use device "cpu" (evener run --cpu)']
        raise DeviceError(f"{asked}: there is no CUDA device here: {why}.", fix=fix)
    count = torch.cuda.device_count()
    if not 0 <= slot < count:
        evidence = [f"visible slots: 0 to {count - 1}" if count > 1 else "visible slot: 0"]
        if visible is not None:
            pairs = ", ".join(f"slot {i} is GPU {name.strip()}" for i, name in enumerate(visible.split(",")[:count]))
            evidence.append(f"CUDA_VISIBLE_DEVICES={visible}: {pairs}")
        raise DeviceError(
            f"{asked}: cuda:{slot} does not exist; {count} GPU{'s are' if count != 1 else ' is'} visible.",
            evidence=evidence,
            fix=[
                "torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever its number in "
                "nvidia-smi",
                f"evener run --nproc {count} starts one process per visible GPU",
            ],
        )
    return torch.device("cuda", slot)
