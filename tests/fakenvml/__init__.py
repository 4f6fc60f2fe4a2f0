"""A machine with GPUs out of a text file: real NVML clients load the stand-in library that `fakenvml.c` is compiled to.

    fake = Fake(tmp_path, EIGHT)                        # or any text in the grammar below
    subprocess.run([...], env=fake.environ())           # LD_LIBRARY_PATH must be set before the process starts
    fake.write("init UNKNOWN")                          # read again at the next NVML call
    fake.occupy(pid, "3 C 20000")                       # a live process takes 20,000 MiB of GPU 3, until it ends

The grammar, one fact a line, `#` begins a comment; defaults make every key optional:

    driver 570.86.15 | cuda 12080
    init LIB_RM_VERSION_MISMATCH      nvmlInit fails so (DRIVER_NOT_LOADED, NO_PERMISSION, UNKNOWN, ...)
    gpu 0 name="NVIDIA H200" uuid=GPU-... mem=143771 used=600 reserved=512 util=97 temp=63 power=640 plimit=700 cc=9.0
          bus=0000:19:00 numa=0 mig=0 compute_mode=0 persistence=1 ecc=0 remap=0 throttle=0 width=16 max_width=16
          plimit_default=400 replays=0 recoveries=0 crc=0          the three: errors counted on its first NVLink
          fan=-1 delay=0             memory in MiB, power in W; delay: milliseconds that every call takes
    mig 2 0 mem=9856 gi=7 ci=0 uuid=MIG-...             MIG device 0 of GPU 2, and MIG is on
    proc 0 pid=123 mem=90000 type=C|G|M                 proc 2.1: on MIG device 1 of GPU 2; mem=NA
    err 7 *=GPU_IS_LOST                                 err 3 nvmlDeviceGetComputeRunningProcesses=NO_PERMISSION
    link 0 1 topo=10 nvlink=4 p2p=0                     topo: nvmlGpuTopologyLevel; p2p: nvmlGpuP2PStatus, 0 is good
    procs_dir DIR                                       `occupy` writes there

FAKE_NVML_VISIBLE=3,5 shows these GPUs only, counted anew, as a container would.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ERAS = (470, 535, 570)
COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the stand-in NVML library needs a C compiler")

EIGHT = "\n".join(
    f'gpu {i} name="NVIDIA A100-SXM4-80GB" bus=0000:{0x19 + 16 * i:02X}:00 numa={i // 4}' for i in range(8)
)

# One machine with everything that can be wrong at once.
ZOO = """
gpu 0 name="NVIDIA H200" mem=143771 util=97 temp=63 power=640 plimit=700 cc=9.0 bus=0000:19:00
gpu 1 name="NVIDIA H200" mem=143771 cc=9.0 bus=0000:3B:00
gpu 2 name="NVIDIA A100-SXM4-80GB" bus=0000:4C:00
mig 2 0 mem=9856 used=13
mig 2 1 mem=19968 used=13 name="NVIDIA A100-SXM4-80GB MIG 2g.20gb"
gpu 3 name="NVIDIA A100-SXM4-80GB" bus=0000:5D:00
gpu 4 name="NVIDIA GeForce RTX 3090" mem=24576 cc=8.6 bus=0000:9B:00 numa=1 fan=45
gpu 5 name="NVIDIA GeForce RTX 3090" mem=24576 cc=8.6 used=21000 bus=0000:BB:00 numa=1
gpu 6 name="NVIDIA GeForce GTX 1080 Ti" mem=11264 cc=6.1 bus=0000:CB:00 numa=1 util=50
gpu 7 name="NVIDIA A100-SXM4-80GB" bus=0000:DB:00
err 3 nvmlDeviceGetComputeRunningProcesses=NO_PERMISSION
err 7 *=GPU_IS_LOST
proc 4 pid=4194305 mem=8000
link 0 1 topo=10 nvlink=4
link 4 5 topo=50
"""


@functools.cache
def library(era: int = 570) -> Path:
    """The folder with the compiled libnvidia-ml.so.1 of one driver era."""
    assert COMPILER is not None and era in ERAS
    folder = Path(tempfile.mkdtemp(prefix=f"evener-fakenvml-{era}-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # processes of other users load it too
    source = Path(__file__).with_name("fakenvml.c")
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1", f"-DERA={era}"]
    subprocess.run([COMPILER, *flags, "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


class Fake:
    """A scenario file, and the environment that makes NVML clients read it."""

    def __init__(self, folder: Path, scenario: str, era: int = 570) -> None:
        self.era, self.path = era, folder / "gpus.txt"
        self.processes = folder / "gpu-processes"
        self.processes.mkdir(mode=0o777)
        self.processes.chmod(0o777)  # despite a umask
        self.write(scenario)

    def write(self, scenario: str) -> None:
        """Replaces the scenario in one step: a reader sees the old machine or the new one."""
        new = self.path.with_name("gpus.new")
        new.write_text(f"procs_dir {self.processes}\n{scenario}\n")
        os.replace(new, self.path)

    def occupy(self, pid: int, *lines: str) -> None:
        new = self.processes / f"new-{pid}"
        new.write_text("".join(f"{line}\n" for line in lines))
        os.replace(new, self.processes / str(pid))

    def program(self, folder: Path) -> Path:
        """A folder for PATH with a stand-in `nvidia-smi` that shows this machine."""
        folder.mkdir()
        path = folder / "nvidia-smi"
        script = Path(__file__).with_name("nvidia_smi.py")
        settings = f"LD_LIBRARY_PATH={library(self.era)} FAKE_NVML={self.path}"
        path.write_text(f'#!/bin/sh\nexec env {settings} {sys.executable} {script} "$@"\n')
        path.chmod(0o755)
        return folder

    def environ(self, base: Mapping[str, str] | None = None, **more: str) -> dict[str, str]:
        environ = dict(os.environ if base is None else base)
        return {**environ, "LD_LIBRARY_PATH": str(library(self.era)), "FAKE_NVML": str(self.path), **more}
