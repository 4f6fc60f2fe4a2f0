"""A stand-in for the program nvidia-smi: `--query-gpu` and `--query-compute-apps` as CSV, from whatever NVML is loaded.

Its exit codes and texts in trouble (9, 15, 18) are an approximation of the real program's.
"""

from __future__ import annotations

import sys

import pynvml

OLD = 510  # drivers before that do not know two of the fields, and refuse the whole query


def main() -> int:
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        print(f"Failed to initialize NVML: {error}")
        return 18 if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch) else 9
    if "query-compute-apps" in options:
        for i in range(pynvml.nvmlDeviceGetCount()):
            apps(i)
        return 0
    fields = options["query-gpu"].split(",")
    driver = pynvml.nvmlSystemGetDriverVersion()
    for field in ("memory.reserved", "compute_cap"):
        if field in fields and int(driver.split(".")[0]) < OLD:
            print(f'Field "{field}" is not a valid field to query.')
            return 2
    for i in range(pynvml.nvmlDeviceGetCount()):
        print(", ".join(str(cell(i, field)) for field in fields))
    return 0


def apps(index: int) -> None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        except pynvml.NVMLError_FunctionNotFound:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
        for one in found:
            memory = "[N/A]" if one.usedGpuMemory is None else one.usedGpuMemory >> 20
            print(f"{pynvml.nvmlDeviceGetUUID(handle)}, {one.pid}, {memory}")
    except pynvml.NVMLError:
        pass


def cell(index: int, field: str) -> object:
    if field == "index":
        return index
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        except pynvml.NVMLError_FunctionNotFound:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "uuid": lambda: pynvml.nvmlDeviceGetUUID(handle),
            "name": lambda: pynvml.nvmlDeviceGetName(handle),
            "memory.total": lambda: memory.total >> 20,
            "memory.used": lambda: memory.used >> 20,
            "memory.free": lambda: memory.free >> 20,
            "memory.reserved": lambda: memory.reserved >> 20,
            "utilization.gpu": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "temperature.gpu": lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
            "power.draw": lambda: f"{pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.2f}",
            "power.limit": lambda: f"{pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000:.2f}",
            "pci.bus_id": lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "driver_version": pynvml.nvmlSystemGetDriverVersion,
            "compute_cap": lambda: "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            "mig.mode.current": lambda: ["Disabled", "Enabled"][pynvml.nvmlDeviceGetMigMode(handle)[0]],
        }[field]()
    except pynvml.NVMLError_NotSupported:
        return "[N/A]"
    except pynvml.NVMLError_GpuIsLost:
        return "[GPU is lost]"
    except pynvml.NVMLError:
        return "[Unknown Error]"


if __name__ == "__main__":
    raise SystemExit(main())
