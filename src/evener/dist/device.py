"""Which device this process uses: chosen or checked, and explained when it cannot be."""

from __future__ import annotations

import os

import torch

from evener.dist.info import here
from evener.errors import DeviceError, ShortageError
from evener.gpus import Gpu, leases, look, pick, visible


def device(spec: str | int | torch.device | None = None) -> torch.device:
    """The device for this process, checked.

    None takes the GPU whose slot is the local rank, else Apple's MPS (one process), else the CPU. A process that nobody
    launched (`python train.py`) and that sees several GPUs takes an idle one, under a lease that ends with the process,
    and says so; called again it returns the same one. A number is a slot: a position inside CUDA_VISIBLE_DEVICES, not
    the number that nvidia-smi shows.

    No communication. Makes no CUDA context (memory on a GPU is touched by the first tensor).

    Raises:
        DeviceError: the device does not exist here, or several processes would share what cannot be shared.
        ShortageError: alone, and none of the GPUs is idle.
    """
    place = here()
    if spec is None:
        if torch.cuda.is_available():
            launched = "LOCAL_RANK" in os.environ or place.world_size > 1
            if not launched and torch.version.hip is None and torch.cuda.device_count() > 1:
                return _cuda(_idle_slot(), "the idle GPU")
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
            what = f"MPS works for one process; this job has {place.world_size}."
            raise DeviceError(what, fix=["evener run --nproc 1", "or --cpu for several processes"])
        return wanted
    if wanted.type == "cpu":
        return torch.device("cpu")
    raise DeviceError(f"device {str(wanted)!r} is not supported.", fix=["cpu, cuda or mps"])


def hardware(device: torch.device) -> str:
    """What kernels are chosen by: the GPU's name, or what the CPU can do."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _idle_slot() -> int:
    """The slot of an idle GPU that this process now holds, or has held since it asked before."""
    folder = leases.default_path()
    seen = look.look(os.environ, holder_of=leases.Folder(folder).holder)
    if seen.trouble is not None:
        pick.say_on_stderr(f"cuda:0, whoever else uses it: {seen.trouble.cause}")
        return 0
    for gpu in seen.gpus:
        if gpu.slot is not None and gpu.lease is not None and gpu.lease.pid == os.getpid():
            return gpu.slot
    unknown = [line for line in seen.visible if "is not known" in line]
    if unknown:
        pick.say_on_stderr(f"cuda:0, whoever else uses it: {unknown[0]}")
        return 0
    try:
        picked = pick.pick(pick.Wish(count=1), os.environ, lock_folder=folder)
    except ShortageError as error:
        fix = ['evener.device("cuda:0") shares a GPU knowingly', "`evener run --gpus 1 --wait` waits for one"]
        raise ShortageError(f"No GPU is idle. {error.cause}", evidence=error.evidence, fix=fix) from None
    taken = picked.gpus[0]
    assert isinstance(taken, Gpu) and taken.slot is not None
    claim = "under a lease until this process ends" if picked.lease is not None else picked.notes[-1]
    pick.say_on_stderr(f"cuda:{taken.slot} is GPU {taken.index} ({taken.name}), idle, {claim}")
    return taken.slot


def _cuda(slot: int, asked: str) -> torch.device:
    value = os.environ.get(visible.VARIABLE)
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            why = f"this torch ({torch.__version__}) was built without CUDA"
            fix = ["install a CUDA build of torch", 'or use device "cpu" (evener run --cpu)']
        elif value is not None and value.strip() in ("", "-1"):
            why = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
            fix = ["unset CUDA_VISIBLE_DEVICES", 'or use device "cpu" (evener run --cpu)']
        else:
            why = "torch finds no usable GPU (no driver, or no permission)"
            fix = ["nvidia-smi shows whether the driver works", 'or use device "cpu" (evener run --cpu)']
        raise DeviceError(f"{asked}: there is no CUDA device here: {why}.", fix=fix)
    count = torch.cuda.device_count()
    if not 0 <= slot < count:
        evidence = [f"visible slots: 0 to {count - 1}" if count > 1 else "visible slot: 0"]
        fix = ["torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever nvidia-smi calls it"]
        if value is not None:
            pairs = ", ".join(f"slot {i} is GPU {name.strip()}" for i, name in enumerate(value.split(",")[:count]))
            evidence.append(f"CUDA_VISIBLE_DEVICES={value}: {pairs}")
        seen = look.look(os.environ)
        error = visible.explain_slots([slot], visible.read(os.environ, seen.gpus), seen.gpus) if seen.gpus else None
        if error is not None:
            evidence, fix = list(error.evidence) or evidence, list(error.fix)
        what = f"{asked}: cuda:{slot} does not exist; {count} GPU{'s are' if count != 1 else ' is'} visible."
        raise DeviceError(what, evidence=evidence, fix=[*fix, f"evener run --nproc {count} starts one process per GPU"])
    return torch.device("cuda", slot)
