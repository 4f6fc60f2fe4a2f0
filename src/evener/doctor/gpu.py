"""Checks of GPUs and driver, over what the probe of `evener gpus` and the torch child said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.host import known
from evener.doctor.seen import Faults, Skipped, Unknown, error, warning
from evener.gpus import visible
from evener.gpus.look import IDLE_BYTES_WITH_RESERVED, size
from evener.gpus.nvml import PATHS
from evener.gpus.values import Gpu

NONE = "no NVIDIA GPU here"
_HIDDEN_BYTES = 500 << 20
_SERIOUS_XIDS = {48, 63, 64, 74, 79, 92, 94, 95}
_BUILDS = ("cu118", "cu121", "cu124", "cu126", "cu128", "cu130")  # CUDA builds of torch, oldest first
_STAGES = {"import": "import torch", "cuda": "torch.cuda.is_available()"}
_STAGES |= {"gloo": "all-reduce", "nccl": "NCCL all-reduce"}


def well(f: Facts) -> list[Gpu]:
    """GPUs that answer; a check that needs one ends here without."""
    if not (found := [gpu for gpu in f.gpus.gpus if gpu.error is None]):
        raise Skipped(NONE)
    return found


def used(f: Facts) -> list[Gpu]:
    """GPUs that a program started here would see; all of them where that is not known."""
    return [gpu for gpu in well(f) if gpu.slot is not None] or well(f)


def told(answers: Iterable[Any], words: str) -> str:
    """No fault was found: good, unless nobody answered."""
    if all(one is None for one in answers):
        raise Unknown("the driver does not tell")
    return words


def label(gpu: Gpu) -> str:
    return f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")


def uuids(gpus: Iterable[Gpu]) -> str:
    return ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)


def driver_match(f: Facts) -> Faults:
    kernel, library = f.kernel_driver, f.nvml_library
    nvml_says = f.gpus.trouble is not None and f.gpus.trouble.kind == "mismatch"
    if nvml_says or (kernel and library and kernel != library):
        said = ": NVML says they do not match" * nvml_says
        yield error(f"kernel module {kernel or '?'}, library {library or '?'}{said}", "reboot")
    if not (kernel and library) and not f.gpus.driver:
        raise Skipped("no NVIDIA driver here")
    return f"driver {f.gpus.driver or kernel}"


def nvml(f: Facts) -> Faults:
    trouble, driver, count = f.gpus.trouble, f.kernel_driver, len(f.gpus.gpus)
    if trouble is None and f.gpus.source != "none":
        return f"{count} GPU{'s' * (count != 1)}, driver {f.gpus.driver or '?'}, CUDA {f.gpus.cuda or '?'}"
    if f.device_files and f.nvml_library is None and (trouble is None or trouble.kind == "no-driver"):
        yield error(f"/dev/{f.device_files[0]} is there, libnvidia-ml.so.1 is not", "no-library", version=driver or "?")
    elif f.device_files:
        cause = trouble.cause if trouble else "NVML gave no answer"
        yield error(f"/dev/{f.device_files[0]} is there, but: {cause}", "lost-device-rules")
    elif trouble is not None and trouble.broken:
        yield error(trouble.cause, "load")
    elif driver:
        yield warning(f"the host has driver {driver}, and no GPU is handed to this container", "no-gpu-in-container")
    raise Skipped(NONE)


def lost_gpu(f: Facts) -> Faults:
    for gpu in f.gpus.gpus:
        if gpu.error is not None:
            others = uuids(one for one in f.gpus.gpus if one.error is None) or '""'
            fix = "reset" if "reset" in gpu.error.lower() else "lost"
            yield error(f"{label(gpu)}: {gpu.error}", fix, others=others, index=gpu.index)
    if f.kernel_log:
        xids = {int(number) for line in f.kernel_log for number in re.findall(r"Xid \([^)]*\): (\d+)", line)}
        serious = _SERIOUS_XIDS & xids or not xids  # newer drivers log a lost GPU without an Xid
        count = len(f.kernel_log)
        found = f"the kernel's log has {count} line{'s' * (count > 1)} about it, the last: {f.kernel_log[-1][:160]}"
        yield (error if serious else warning)(found, "xid")
    log = "may not be read" if f.kernel_log is None else "has no Xid"
    return f"all {len(well(f))} GPUs answer; the kernel's log {log}"


def wheel(driver_cuda: str | None) -> str:
    """The newest CUDA build of torch that a driver serves; the newest of all where the driver is unknown."""
    limit = int(driver_cuda.replace(".", "")) if driver_cuda else 1 << 30
    return next((one for one in reversed(_BUILDS) if int(one[2:]) <= limit), _BUILDS[0])


def answered(f: Facts) -> Any:
    """What torch's child said; a check that needs it ends here when there was none, or too many others worked."""
    t = known(f.torch, "torch")
    if t.get("ended") == "late":
        what = "to start" if t.get("stage") in (None, "import") else f"for its {_STAGES.get(t['stage'], 'work')}"
        load = f"load {t['load']:.0f} on {t['cpus']} cores"
        raise Unknown(f"torch took longer than {t['seconds']:.0f} s {what}; {load}: --timeout 60 waits longer")
    return t


def torch_cuda(f: Facts) -> Faults:
    t, gpus, has = answered(f), [gpu for gpu in f.gpus.gpus if gpu.error is None], f.gpus.cuda
    fill: dict[str, Any] = {"python": f.python, "wheel": wheel(has), "driver": f.gpus.driver or "the driver"}
    stage, ended, needs = t.get("stage"), t.get("ended"), t.get("cuda")
    if ended and stage in ("import", "cuda", None):
        what = f"hung for {t['seconds']:.0f} s" if ended == "hung" else ended
        found = f"a child process {what} at: {_STAGES.get(stage, 'its start')}"
        yield error(found, "hangs" if ended == "hung" else "aborts", **fill)
        return ""
    if "import_error" in t:
        fix = "no-torch" if "No module named 'torch'" in t["import_error"] else "import"
        yield error(f"import torch fails: {t['import_error']}", fix, **fill)
        return ""
    if ended and needs:
        raise Unknown("torch's child ended before it came to CUDA: see collective")
    version = f"torch {t['version']}"
    if needs is None:
        if gpus:
            yield error(f"{version} is built without CUDA, and there are {len(gpus)} GPUs", "cpu-build", **fill)
        return f"{version}, built without CUDA; {NONE}"
    built, serves = ([int(part) for part in text.split(".")] for text in (needs, has or "999"))
    if built[0] > serves[0]:
        found = f"{version} is built for CUDA {needs}, the driver serves up to {has}"
        yield error(found, "newer-driver", cuda=needs, has=f"CUDA {has}", **fill)
    elif gpus and not t.get("available") and f.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        yield error(f"{version} sees no GPU: {t.get('cuda_error') or 'no reason given'}", "unavailable", **fill)
    elif built > serves:
        yield warning(f"{version} is built for CUDA {needs}, the driver serves {has}", "minor")
    return f"{version}, CUDA {needs}, NCCL {t.get('nccl_version') or 'none'}; {t.get('devices', 0)} GPUs seen"


def arch_list(f: Facts) -> Faults:
    gpus = [gpu for gpu in used(f) if gpu.compute_capability]
    built = answered(f).get("arch_list")
    if not built:
        raise Unknown("torch told no list of architectures: see torch-cuda")
    for gpu in gpus:
        if not runs_on(gpu.compute_capability or "", built):
            found = f"{label(gpu)} has {gpu.compute_capability}; torch was built for {' '.join(built)}"
            yield error(found, "wheel", capability=gpu.compute_capability)
    return f"{', '.join(sorted({str(gpu.compute_capability) for gpu in gpus}))}: covered by {' '.join(built)}"


def runs_on(capability: str, built: list[str]) -> bool:
    """sm_86 runs on 8.6 and later 8.x; sm_90a on 9.0 alone; compute_80 is PTX and runs on 8.0 and everything later."""
    here = tuple(map(int, capability.split(".")))
    for name in built:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name):
            there = int(match[2]), int(match[3])
            later = here >= there and (here[0] == there[0] or (match[1] == "compute" and not match[4]))
            if here == there or (later and match[4] != "a"):
                return True
    return False


def visible_devices(f: Facts) -> Faults:
    if (value := f.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return "not set: every GPU is visible"
    if not f.gpus.gpus:
        raise Skipped(f"CUDA_VISIBLE_DEVICES={value!r}, and {NONE}")
    # As if the order were known: what an index means is the check device-order's.
    seen = visible.read({visible.VARIABLE: value, visible.ORDER: "PCI_BUS_ID"}, f.gpus.gpus)
    found = "; ".join((f"CUDA_VISIBLE_DEVICES={value}", *seen.because, f"{len(seen.slots)} visible"))
    meant = dict.fromkeys(gpu for word in value.split(",") for gpu in f.gpus.gpus if _names(word.strip(), gpu))
    if value.strip() in ("", "-1"):
        yield warning(f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(f.gpus.gpus)} GPUs", "unset")
    elif seen.because:
        yield error(found, "correct" if meant else "unset", corrected=uuids(meant))
    return found


def _names(word: str, gpu: Gpu) -> bool:
    """What somebody who wrote this word meant, however CUDA reads it."""
    if word.isdecimal():
        return gpu.index == int(word)
    return bool(gpu.uuid and len(word) > 4 and gpu.uuid.lower().startswith(word.lower()))


def device_order(f: Facts) -> Faults:
    models = sorted({gpu.name for gpu in well(f) if gpu.name})
    order, by_uuid = f.environ.get(visible.ORDER), f.environ.get(visible.VARIABLE, "").startswith(("GPU-", "MIG-"))
    if len(models) > 1 and order != "PCI_BUS_ID" and not by_uuid:
        yield warning(f"models are mixed ({', '.join(models)}) and {visible.ORDER} is {order or 'not set'}", "order")
    return "GPUs are named by UUID" if by_uuid else order or "all GPUs are of one model"


def hidden_memory(f: Facts) -> Faults:
    for gpu in well(f):
        processes = [*(gpu.processes or ()), *(one for part in gpu.mig for one in part.processes or ())]
        if any(one.memory_bytes is None for one in processes):
            continue  # whose is the rest, nobody can say
        hidden = (gpu.memory_used_bytes or 0) - sum(one.memory_bytes or 0 for one in processes)
        # Old drivers count as used what they reserve for themselves.
        if hidden > (IDLE_BYTES_WITH_RESERVED if gpu.memory_reserved_bytes is None else _HIDDEN_BYTES):
            why = "" if gpu.processes is not None else "; its processes cannot be read"
            yield warning(f"{label(gpu)}: {size(hidden)} in use by nobody who can be seen{why}", "holders")
    return told([gpu.memory_used_bytes for gpu in well(f)], "every GPU's memory has its owner")


def mig(f: Facts) -> Faults:
    on = [gpu for gpu in used(f) if gpu.mig_enabled]
    names = ", ".join(map(label, on))
    if on and f.ranks > 1:
        yield error(f"MIG is on for {names}, and {f.ranks} ranks are wanted", "one", index=on[0].index)
    return f"on for {names}: one process each" if on else "off"


def compute_mode(f: Facts) -> Faults:
    for gpu in well(f):
        if (mode := gpu.health.compute_mode) not in (None, "default"):
            found = f"{label(gpu)}: compute mode {mode}"
            yield (error if mode == "prohibited" else warning)(found, "default-mode", index=gpu.index)
    if off := [f"GPU {gpu.index}" for gpu in well(f) if gpu.health.persistence is False]:
        yield warning(f"persistence mode is off on {', '.join(off)}", "persistence")
    return told([gpu.health.compute_mode for gpu in well(f)], "default, persistent")


def throttling(f: Facts) -> Faults:
    for gpu in well(f):
        limit, normal = gpu.power_limit_w, gpu.health.power_limit_default_w
        lowered = bool(limit and normal and limit < normal)
        watts = "" if not limit else f", limit {limit:.0f} W" + (f" of {normal:.0f} W" if normal else "")
        heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} C"
        reasons = set(gpu.health.throttle or ()) - {"sync boost"}
        if lowered and "power cap" not in reasons:
            found = f"{label(gpu)} may draw {limit:.0f} W, its default is {normal:.0f} W"
            yield warning(found, "power-limit", index=gpu.index, watts=f"{normal:.0f}")
        for reason in sorted(reasons):
            kind = {"thermal (software)": "thermal", "power cap": "power-limit"}.get(reason, "hardware")
            if kind == "power-limit" and normal and not lowered:
                continue  # a GPU that works hard reaches the limit that it was made for
            found = f"{label(gpu)} is slowed: {reason}{heat}{watts if kind == 'power-limit' else ''}"
            fill = {"index": gpu.index, "watts": f"{normal:.0f}" if normal else "WATTS"}
            yield (error if kind == "hardware" else warning)(found, kind, **fill)
    return told([gpu.health.throttle for gpu in well(f)], "no clock is held down")


def ecc(f: Facts) -> Faults:
    for gpu in well(f):
        name, index, h = label(gpu), gpu.index, gpu.health
        if h.ecc_uncorrected_errors:
            yield error(f"{name}: {h.ecc_uncorrected_errors} uncorrected ECC errors", "drain", index=index)
        if h.remapped_rows_failed:
            yield error(f"{name}: a row could not be remapped", "drain", index=index)
        elif h.remapped_rows_pending:
            yield warning(f"{name}: a remapped row waits for a reset", "reset", index=index)
        counts = (h.nvlink_recoveries, "recoveries"), (h.nvlink_replays, "replays"), (h.nvlink_crc_errors, "CRC errors")
        if links := ", ".join(f"{count} {what}" for count, what in counts if count):
            yield (error if h.nvlink_recoveries else warning)(f"{name}: NVLink: {links}", "nvlink", index=index)
    return told([gpu.health.ecc_uncorrected_errors for gpu in well(f)], "no uncorrected error, no NVLink error")


def pcie(f: Facts) -> Faults:
    for gpu in well(f):
        h = gpu.health
        working = (gpu.utilization_percent or 0) > 50  # an idle link may rest in a lower generation
        if (h.pcie_width or 99) < (h.pcie_width_max or 0):
            yield warning(f"{label(gpu)}: x{h.pcie_width} of x{h.pcie_width_max}", "reseat", index=gpu.index)
        elif working and (h.pcie_generation or 99) < (h.pcie_generation_max or 0):
            found = f"{label(gpu)}: generation {h.pcie_generation} of {h.pcie_generation_max} under load"
            yield warning(found, "reseat", index=gpu.index)
    return told([gpu.health.pcie_width for gpu in well(f)], "full width")


def topology(f: Facts) -> Faults:
    gpus, far = used(f), PATHS[50]
    if len(gpus) < 2:
        raise Skipped("one GPU")
    links = {frozenset((one.a, one.b)): one for one in f.gpus.links}
    pairs = {pair: links.get(frozenset((pair[0].index, pair[1].index))) for pair in combinations(gpus, 2)}
    across = {pair for pair, link in pairs.items() if link and link.path == far and not link.nvlinks}
    count = min(max(f.ranks, 2), len(gpus))
    for first in gpus if across and count < len(gpus) else ():
        near = [first, *(one for one in gpus if one is not first and not {(first, one), (one, first)} & across)][:count]
        if len(near) == count and not set(combinations(sorted(near, key=gpus.index), 2)) & across:
            found = f"of {len(gpus)} visible GPUs some are on the other socket, and {count} ranks fit on one side"
            yield warning(found, "set", better=uuids(near), count=count)
            break
    paths = [link.path for link in pairs.values() if link and link.path]
    longest = max(paths, key=list(PATHS.values()).index, default=None)
    linked = " with NVLink" * all(link is not None and bool(link.nvlinks) for link in pairs.values())
    return told([longest], f"{len(gpus)} GPUs{linked}, the longest way: {longest}")


def peer_access(f: Facts) -> Faults:
    if len(well(f)) < 2:
        raise Skipped("one GPU")
    line = f.kernel_command_line or ""
    if f.acs_bridges:
        found = f"ACS redirects peer traffic on {len(f.acs_bridges)} bridges"
        yield warning(found, "acs", bridges=" ".join(f.acs_bridges))
    if re.search(r"\b(intel|amd)_iommu=on\b", line) and "iommu=pt" not in line:
        yield warning("the IOMMU translates (no iommu=pt on the kernel's command line)", "iommu")
    if off := [f"{one.a}-{one.b}: {one.p2p}" for one in f.gpus.links if one.p2p not in (None, "ok")]:
        yield warning(f"no peer access between {len(off)} pairs ({', '.join(off[:6])})", "status")
    return told([one.p2p for one in f.gpus.links], "every pair has peer access")


def numa(f: Facts) -> Faults:
    nodes = {gpu.index: gpu.numa_node for gpu in used(f) if gpu.numa_node is not None}
    if len(f.node_cpus) < 2 or not nodes:
        raise Skipped("one NUMA node, or no GPU of a known one")
    here = [int(node) for node, usable in f.node_cpus.items() if usable]
    words = ", ".join(map(str, here)) or "none"
    for index, there in nodes.items():
        if there not in here:
            found = f"GPU {index} is on node {there}, this process on {words}"
            yield warning(found, "bind", index=index, here=words, there=there)
    return ", ".join(f"GPU {index} on node {node}" for index, node in nodes.items())


def collective(f: Facts) -> Faults:
    t = answered(f)
    stage, ended = t.get("stage"), t.get("ended")
    if "import_error" in t or (ended and stage not in ("gloo", "nccl")):
        raise Unknown("torch could not be asked: see torch-cuda")
    fill = {"python": f.python, "child": t.get("child", "")}
    if ended:
        fix = "aborts" if ended != "hung" else "nccl" if stage == "nccl" else "loopback"
        yield error(f"{_STAGES[stage]}: the child {ended} after {t['seconds']:.0f} s", fix, **fill)
        return ""
    words = []
    for name, result in ((name, t[name]) for name in ("gloo", "nccl") if t.get(name)):
        if result.get("error"):
            yield error(f"{name}: {result['error']}", "nccl" if name == "nccl" else "loopback", **fill)
            continue
        if result["wrong"]:
            where = f"{name}, {result['wrong']}"
            yield error(f"{where}: the sum is wrong", "wrong", where=where)
        speeds = result["pairs"]
        usual = sorted(speeds.values())[len(speeds) // 2] if len(speeds) > 2 else 0.0
        for pair, speed in speeds.items():
            if speed < usual / 2:
                found = f"{name} between ranks {pair}: {speed / 1e9:.2f} GB/s, half the pairs have {usual / 1e9:.2f}"
                yield warning(found, "slow", where=f"ranks {pair}")
        words.append(f"{name} on {result['ranks']} ranks, {result['bytes_per_second'] / 1e9:.2f} GB/s")
    if not words:
        raise Unknown("it was not tried")
    return "; ".join(words)
