"""The probe through the program nvidia-smi, for machines where its library cannot be loaded (odd installations)."""

from __future__ import annotations

import shutil
import subprocess

from evener.gpus.nvml import named_process
from evener.gpus.values import MIB, Gpu, Process, Snapshot, Trouble

FIELDS = (
    "index,uuid,name,memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,temperature.gpu,power.draw,"
    "power.limit,pci.bus_id,driver_version,compute_cap,mig.mode.current"
)
# What drivers before 510 and 515 do not know, and refuse as a whole.
FIELDS_OF_OLD_DRIVERS = FIELDS.replace(",memory.reserved", "").replace(",compute_cap", "")
SECONDS = 20  # with a lost GPU it can take long


def read() -> Snapshot | None:
    """What its CSV says; what it leaves out ("[N/A]", "[GPU is lost]") is unknown. None: there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    for fields in (FIELDS, FIELDS_OF_OLD_DRIVERS):
        code, table = _call(f"--query-gpu={fields}")
        if code == 0:
            break
    else:
        evidence = f"nvidia-smi ended with {code}: {', '.join(table[0]) if table else 'no word'}"
        return Snapshot(
            trouble=Trouble("other", "nvidia-smi cannot read the GPUs.", True, (evidence,), ("nvidia-smi",))
        )
    rows = [dict(zip(fields.split(","), cells)) for cells in table]
    code, table = _call("--query-compute-apps=gpu_uuid,pid,used_gpu_memory")
    processes: dict[str, list[Process]] = {}
    for uuid, pid, memory in (cells for cells in table if len(cells) == 3 and cells[1].isdecimal()):
        processes.setdefault(uuid, []).append(named_process(int(pid), _whole(memory, MIB), "compute"))
    gpus = tuple(_gpu(row, processes if code == 0 else None) for row in rows)
    return Snapshot(next((_word(row["driver_version"]) for row in rows), None), source="nvidia-smi", gpus=gpus)


def _call(query: str) -> tuple[int, list[list[str]]]:
    """Its exit code, and the cells of every line it printed."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        code, text = done.returncode, done.stdout or done.stderr
    except subprocess.TimeoutExpired:
        code, text = 124, f"no answer within {SECONDS} s"
    except OSError as error:
        code, text = 127, str(error)
    return code, [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _word(cell: str | None) -> str | None:
    return None if cell is None or cell.startswith("[") or cell in ("", "N/A") else cell


def _number(cell: str | None) -> float | None:
    try:
        return float(_word(cell) or "")
    except ValueError:
        return None


def _whole(cell: str | None, unit: int = 1) -> int | None:
    number = _number(cell)
    return None if number is None else int(number * unit)


def _gpu(row: dict[str, str], processes: dict[str, list[Process]] | None) -> Gpu:
    uuid, mig = _word(row["uuid"]), _word(row.get("mig.mode.current"))
    return Gpu(
        index=int(row["index"]),
        uuid=uuid,
        name=_word(row["name"]),
        memory_total_bytes=_whole(row["memory.total"], MIB),
        memory_used_bytes=_whole(row["memory.used"], MIB),
        memory_free_bytes=_whole(row["memory.free"], MIB),
        memory_reserved_bytes=_whole(row.get("memory.reserved"), MIB),
        utilization_percent=_whole(row["utilization.gpu"]),
        temperature_c=_whole(row["temperature.gpu"]),
        power_w=_number(row["power.draw"]),
        power_limit_w=_number(row["power.limit"]),
        compute_capability=_word(row.get("compute_cap")),
        pci_bus_id=_word(row["pci.bus_id"]),
        mig_enabled=None if mig is None else mig == "Enabled",
        processes=None if processes is None else tuple(processes.get(uuid or "", ())),
        error=next((cell.strip("[]") for cell in row.values() if "lost" in cell.lower()), None),
    )
