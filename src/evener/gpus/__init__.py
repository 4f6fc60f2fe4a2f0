"""The GPUs of this machine: what is there, what a process would see of it, who holds what, and which are free to take.

values    the frozen values, and the JSON contract          look      one look: probe, verdicts, what is wrong
nvml      the probe through NVML                            smi       the probe through nvidia-smi
visible   the algebra of CUDA_VISIBLE_DEVICES               owners    who a process id is
"""

from evener.gpus.look import look as look_at_gpus
from evener.gpus.look import read_recording
from evener.gpus.values import Gpu, Health, Holder, Link, MigDevice, Process, Snapshot, Trouble, from_json, to_json

__all__ = ["Gpu", "Health", "Holder", "Link", "MigDevice", "Process", "Snapshot", "Trouble"]
__all__ += ["from_json", "look_at_gpus", "read_recording", "to_json"]
