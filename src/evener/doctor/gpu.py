"""Checks of GPUs and driver, over what the probe of `evener gpus` and the torch child said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.host import size
from evener.doctor.seen import Seen, error, ok, skipped, unknown, warning
from evener.gpus import visible
from evener.gpus.values import Gpu, Link

NONE = "no NVIDIA GPU here"
_HIDDEN_BYTES = 500 << 20
_SERIOUS_XIDS = {48, 63, 64, 74, 79, 92, 94, 95}
_RELEASES = ("cu118", "cu121", "cu124", "cu126", "cu128", "cu130")  # CUDA builds of torch, oldest first
_PATHS = ("same board", "one PCIe switch", "several PCIe switches", "one host bridge", "one socket", "other socket")


def well(f: Facts) -> list[Gpu]:
    return [gpu for gpu in f.gpus.gpus if gpu.error is None]


def used(f: Facts) -> list[Gpu]:
    """GPUs that a program started here would see; all of them where that is not known."""
    return [gpu for gpu in well(f) if gpu.slot is not None] or well(f)


def label(gpu: Gpu) -> str:
    return f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")


def driver_match(f: Facts) -> Iterator[Seen]:
    kernel, library, trouble = f.kernel_driver, f.nvml_library, f.gpus.trouble
    if trouble is not None and trouble.kind == "mismatch":
        yield error(f"kernel module {kernel or '?'}, library {library or '?'}: NVML says they do not match", "reboot")
    elif kernel and library and kernel != library:
        yield error(f"kernel module {kernel}, library {library}", "reboot")
    elif kernel and library:
        yield ok(f"both are {kernel}")
    elif f.gpus.driver:
        yield ok(f"driver {f.gpus.driver} answers")
    else:
        yield skipped("no NVIDIA driver here")


def nvml(f: Facts) -> Iterator[Seen]:
    trouble, driver = f.gpus.trouble, f.kernel_driver
    if trouble is None and (f.gpus.gpus or f.gpus.source == "nvml"):
        count = len(f.gpus.gpus)
        cuda = f", CUDA {f.gpus.cuda}" if f.gpus.cuda else ""
        yield ok(f"{count} GPU{'s' * (count != 1)}, driver {f.gpus.driver or '?'}{cuda}, asked through {f.gpus.source}")
    elif f.device_files and f.nvml_library is None and (trouble is None or trouble.kind == "no-driver"):
        yield error(f"/dev/{f.device_files[0]} is there, libnvidia-ml.so.1 is not", "no-library", version=driver or "?")
    elif f.device_files:
        cause = trouble.cause if trouble else "NVML gave no answer"
        yield error(f"/dev/{f.device_files[0]} is there, but: {cause}", "lost-device-rules")
    elif trouble is not None and trouble.broken:
        yield error(trouble.cause, "load")
    elif driver:
        yield warning(f"the host has driver {driver}, and no GPU is handed to this container", "no-gpu-in-container")
    else:
        yield skipped(NONE)


def lost_gpu(f: Facts) -> Iterator[Seen]:
    seen = False
    for gpu in f.gpus.gpus:
        if gpu.error is not None:
            seen = True
            others = ",".join(one.uuid or str(one.index) for one in well(f)) or '""'
            fix = "reset" if "reset" in gpu.error.lower() else "lost"
            yield error(f"{label(gpu)}: {gpu.error}", fix, others=others, index=gpu.index)
    numbers = [re.search(r"Xid \([^)]*\): (\d+)", line) for line in f.kernel_log or ()]
    xids = sorted({int(match[1]) for match in numbers if match})
    if f.kernel_log:
        seen = True
        level = error if _SERIOUS_XIDS & set(xids) or not xids else warning
        yield level(f"the kernel's log has {len(f.kernel_log)} such lines, the last: {f.kernel_log[-1][:160]}", "xid")
    if not seen and not f.gpus.gpus:
        yield skipped(NONE)
    elif not seen:
        log = "the kernel's log has no Xid" if f.kernel_log is not None else "the kernel's log may not be read"
        yield ok(f"all {len(f.gpus.gpus)} GPUs answer; {log}")


def wheel(driver_cuda: str | None) -> str:
    """The newest CUDA build of torch that a driver serves; the newest of all where the driver is unknown."""
    if driver_cuda is None:
        return _RELEASES[-1]
    limit = int(driver_cuda.replace(".", ""))
    return next((one for one in reversed(_RELEASES) if int(one[2:]) <= limit), _RELEASES[0])


def torch_cuda(f: Facts) -> Iterator[Seen]:
    t = f.torch
    if t is None:
        yield unknown("torch was not asked")
        return
    fill: dict[str, Any] = {"python": f.python, "wheel": wheel(f.gpus.cuda), "driver": f.gpus.driver or "the driver"}
    has, needs = f.gpus.cuda, t.get("cuda")
    if t.get("stage") in ("import", "cuda") and t.get("ended") == "hung":
        yield error(f"a child process hung for {t['seconds']:.0f} s at: {_STAGES[t['stage']]}", "hangs", **fill)
    elif t.get("stage") in ("import", "cuda") and t.get("ended"):
        yield error(f"a child process {t['ended']} at: {_STAGES[t['stage']]}", "aborts", **fill)
    elif "import_error" in t:
        fix = "no-torch" if "No module named 'torch'" in t["import_error"] else "import"
        yield error(f"import torch fails: {t['import_error']}", fix, **fill)
    elif needs is None and well(f):
        yield error(
            f"torch {t['version']} is built without CUDA, and there are {len(well(f))} GPUs", "cpu-build", **fill
        )
    elif needs is None:
        yield ok(f"torch {t['version']}, built without CUDA; {NONE}")
    elif has is not None and _major(needs) > _major(has):
        found = f"torch {t['version']} is built for CUDA {needs}, the driver serves up to {has}"
        yield error(found, "newer-driver", cuda=needs, has=f"CUDA {has}", **fill)
    elif well(f) and not t.get("available") and f.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        yield error(
            f"torch {t['version']} sees no GPU: {t.get('cuda_error') or 'no reason given'}", "unavailable", **fill
        )
    elif has is not None and tuple(map(int, needs.split("."))) > tuple(map(int, has.split("."))):
        yield warning(f"torch {t['version']} is built for CUDA {needs}, the driver serves {has}", "minor")
    else:
        nccl = t.get("nccl_version") or "none"
        yield ok(f"torch {t['version']}, CUDA {needs}, NCCL {nccl}; {t.get('devices', 0)} GPUs seen")


_STAGES = {
    "import": "import torch",
    "cuda": "torch.cuda.is_available()",
    "gloo": "all-reduce",
    "nccl": "NCCL all-reduce",
}


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def arch_list(f: Facts) -> Iterator[Seen]:
    built = (f.torch or {}).get("arch_list")
    gpus = [gpu for gpu in used(f) if gpu.compute_capability]
    if not gpus:
        yield skipped(NONE)
    elif not built:
        yield unknown("torch has no list of architectures")
    else:
        without = [gpu for gpu in gpus if not runs_on(gpu.compute_capability or "", built)]
        for gpu in without:
            found = f"{label(gpu)} has {gpu.compute_capability}; torch was built for {' '.join(built)}"
            yield error(found, "wheel", capability=gpu.compute_capability)
        if not without:
            yield ok(
                f"{', '.join(sorted({str(gpu.compute_capability) for gpu in gpus}))}: covered by {' '.join(built)}"
            )


def runs_on(capability: str, built: list[str]) -> bool:
    """sm_86 runs on 8.6 and later 8.x; sm_90a on 9.0 alone; compute_80 is PTX and runs on 8.0 and everything later."""
    major, minor = map(int, capability.split("."))
    for name in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        kind, there, least = match[1], int(match[2]), int(match[3])
        if match[4] == "a":
            fits = (major, minor) == (there, least)
        elif kind == "compute" and not match[4]:
            fits = (major, minor) >= (there, least)
        else:
            fits = major == there and minor >= least
        if fits:
            return True
    return False


def visible_devices(f: Facts) -> Iterator[Seen]:
    value = f.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        yield ok("not set: every GPU is visible")
    elif not f.gpus.gpus:
        yield skipped(f"CUDA_VISIBLE_DEVICES={value!r}, and {NONE}")
    elif value.strip() in ("", "-1"):
        yield warning(f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(f.gpus.gpus)} GPUs", "unset")
    else:
        # As if the order were known: what an index means is the check device-order's.
        seen = visible.read({visible.VARIABLE: value, visible.ORDER: "PCI_BUS_ID"}, f.gpus.gpus)
        meant = [gpu for word in value.split(",") for gpu in f.gpus.gpus if _names(word.strip(), gpu)]
        corrected = ",".join(gpu.uuid or str(gpu.index) for gpu in dict.fromkeys(meant))
        found = "; ".join((f"CUDA_VISIBLE_DEVICES={value}", *seen.because, f"{len(seen.slots)} visible"))
        if not seen.because:
            yield ok(found)
        elif corrected:
            yield error(found, "correct", corrected=corrected)
        else:
            yield error(found, "unset")


def _names(word: str, gpu: Gpu) -> bool:
    """What somebody who wrote this word meant, however CUDA reads it."""
    if re.fullmatch(r"\d+", word):
        return gpu.index == int(word)
    return bool(gpu.uuid and len(word) > 4 and gpu.uuid.lower().startswith(word.lower()))


def device_order(f: Facts) -> Iterator[Seen]:
    models = sorted({gpu.name for gpu in f.gpus.gpus if gpu.name})
    order, value = f.environ.get("CUDA_DEVICE_ORDER"), f.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not f.gpus.gpus:
        yield skipped(NONE)
    elif len(models) < 2:
        yield ok("all GPUs are of one model")
    elif order == "PCI_BUS_ID":
        yield ok("CUDA_DEVICE_ORDER=PCI_BUS_ID")
    elif value.startswith(("GPU-", "MIG-")):
        yield ok("CUDA_VISIBLE_DEVICES has UUIDs")
    else:
        yield warning(f"models are mixed ({', '.join(models)}) and CUDA_DEVICE_ORDER is {order or 'not set'}", "order")


def hidden_memory(f: Facts) -> Iterator[Seen]:
    seen, known = False, [gpu for gpu in well(f) if gpu.memory_used_bytes is not None]
    for gpu in known:
        processes = [*(gpu.processes or ()), *(one for part in gpu.mig for one in part.processes or ())]
        hidden = (gpu.memory_used_bytes or 0) - sum(one.memory_bytes or 0 for one in processes)
        if hidden > _HIDDEN_BYTES:
            seen, why = True, "" if gpu.processes is not None else "; its processes cannot be read"
            yield warning(f"{label(gpu)}: {size(hidden)} in use by nobody who can be seen{why}", "holders")
    if not seen:
        yield ok("every GPU's memory has its owner") if known else skipped(NONE)


def mig(f: Facts) -> Iterator[Seen]:
    on = [gpu for gpu in well(f) if gpu.mig_enabled]
    if not on:
        yield ok("off") if well(f) else skipped(NONE)
    elif f.ranks > 1 and {gpu.index for gpu in on} & {gpu.index for gpu in used(f)}:
        yield error(
            f"MIG is on for {', '.join(map(label, on))}, and {f.ranks} ranks are wanted", "one", index=on[0].index
        )
    else:
        yield ok(f"on for {', '.join(map(label, on))}: one process each")


def compute_mode(f: Facts) -> Iterator[Seen]:
    seen = False
    for gpu in well(f):
        mode = gpu.health.compute_mode
        if mode not in (None, "default"):
            seen, level = True, error if mode == "prohibited" else warning
            yield level(f"{label(gpu)}: compute mode {mode}", "default-mode", index=gpu.index)
    if off := [gpu for gpu in well(f) if gpu.health.persistence is False]:
        seen = True
        yield warning(f"persistence mode is off on {', '.join(f'GPU {gpu.index}' for gpu in off)}", "persistence")
    if not seen:
        yield ok("default, persistent") if well(f) else skipped(NONE)


def throttling(f: Facts) -> Iterator[Seen]:
    seen = False
    for gpu in well(f):
        for reason in gpu.health.throttle or ():
            if reason == "sync boost":
                continue
            seen = True
            heat = f", {gpu.temperature_c} C" if gpu.temperature_c is not None else ""
            power = f", limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w and reason == "power cap" else ""
            kind = {"thermal (software)": "thermal", "power cap": "power-limit"}.get(reason, "hardware")
            level = error if kind == "hardware" else warning
            yield level(f"{label(gpu)} is slowed: {reason}{heat}{power}", kind, index=gpu.index)
    if not seen:
        yield _quiet(f, [gpu.health.throttle for gpu in well(f)], "no clock is held down")


def _quiet(f: Facts, answers: list[Any], words: str) -> Seen:
    """Nothing was found: good, unless nobody answered."""
    if not answers:
        return skipped(NONE)
    return ok(words) if any(one is not None for one in answers) else unknown("the driver does not tell")


def ecc(f: Facts) -> Iterator[Seen]:
    seen = False
    for gpu in well(f):
        health = gpu.health
        if health.ecc_uncorrected_errors:
            seen = True
            yield error(
                f"{label(gpu)}: {health.ecc_uncorrected_errors} uncorrected ECC errors", "drain", index=gpu.index
            )
        if health.remapped_rows_failed:
            seen = True
            yield error(f"{label(gpu)}: a row could not be remapped", "drain", index=gpu.index)
        elif health.remapped_rows_pending:
            seen = True
            yield warning(f"{label(gpu)}: a remapped row waits for a reset", "reset", index=gpu.index)
    if not seen:
        yield _quiet(f, [gpu.health.ecc_uncorrected_errors for gpu in well(f)], "no uncorrected error")


def pcie(f: Facts) -> Iterator[Seen]:
    seen = False
    for gpu in well(f):
        h = gpu.health
        working = (gpu.utilization_percent or 0) > 50  # an idle link may rest in a lower generation
        if h.pcie_width and h.pcie_width_max and h.pcie_width < h.pcie_width_max:
            seen = True
            yield warning(f"{label(gpu)}: x{h.pcie_width} of x{h.pcie_width_max}", "reseat", index=gpu.index)
        elif working and h.pcie_generation and h.pcie_generation < (h.pcie_generation_max or 0):
            seen, found = True, f"{label(gpu)}: generation {h.pcie_generation} of {h.pcie_generation_max} under load"
            yield warning(found, "reseat", index=gpu.index)
    if not seen:
        yield _quiet(f, [gpu.health.pcie_width for gpu in well(f)], "full width")


def topology(f: Facts) -> Iterator[Seen]:
    indices = [gpu.index for gpu in used(f)]
    links = {frozenset((one.a, one.b)): one for one in f.gpus.links}
    if len(indices) < 2:
        yield skipped("one GPU" if indices else NONE)
        return
    count = min(max(f.ranks, 2), len(indices))
    pairs = [links.get(frozenset(pair)) for pair in _pairs(indices)]
    if all(pair is None or pair.path is None for pair in pairs):
        yield unknown("the driver does not tell")
    elif any(pair is not None and pair.path == "other socket" and not pair.nvlinks for pair in pairs):
        near = _near(indices, links, count)
        better = ",".join((f.gpus.gpu(index) or Gpu(index)).uuid or str(index) for index in near)
        found = f"of {len(indices)} visible GPUs some are on the other socket without NVLink"
        if count < len(indices) and len(near) == count:
            yield warning(f"{found}, and {count} ranks fit on one side", "set", better=better, count=count)
        else:
            yield ok(f"{found}; all of them are wanted")
    else:
        worst = max((pair.path for pair in pairs if pair and pair.path), key=_PATHS.index)
        links_word = " with NVLink" if all(pair and pair.nvlinks for pair in pairs) else ""
        yield ok(f"{len(indices)} GPUs{links_word}, the longest way: {worst}")


def _pairs(indices: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a in indices for b in indices if a < b]


def _near(indices: list[int], links: dict[frozenset[int], Link], count: int) -> list[int]:
    """`count` of the visible GPUs that are not across a socket from each other, or fewer."""
    for first in indices:
        near = [first]
        for other in indices:
            ways = [links.get(frozenset((one, other))) for one in near if one != other]
            if other not in near and all(way and (way.nvlinks or way.path != "other socket") for way in ways):
                near.append(other)
        if len(near) >= count:
            return near[:count]
    return []


def peer_access(f: Facts) -> Iterator[Seen]:
    if len(well(f)) < 2:
        yield skipped("one GPU" if well(f) else NONE)
        return
    seen, line = False, f.kernel_command_line or ""
    if f.acs_bridges:
        seen = True
        yield warning(
            f"ACS redirects peer traffic on {len(f.acs_bridges)} bridges", "acs", bridges=" ".join(f.acs_bridges)
        )
    if re.search(r"\b(intel|amd)_iommu=on\b", line) and "iommu=pt" not in line:
        seen = True
        yield warning("the IOMMU translates (no iommu=pt on the kernel's command line)", "iommu")
    off = [one for one in f.gpus.links if one.p2p not in (None, "ok")]
    if off:
        seen = True
        words = ", ".join(f"{one.a}-{one.b}: {one.p2p}" for one in off[:6])
        yield warning(f"no peer access between {len(off)} pairs ({words})", "status")
    if not seen:
        yield _quiet(f, [one.p2p for one in f.gpus.links], "every pair has peer access")


def numa(f: Facts) -> Iterator[Seen]:
    nodes = {gpu.index: gpu.numa_node for gpu in used(f) if gpu.numa_node is not None}
    if len(f.numa_cpus) < 2 or not nodes:
        yield skipped("one NUMA node" if len(f.numa_cpus) < 2 else "no GPU with a known NUMA node")
        return
    here = [int(node) for node, cpus in f.numa_cpus.items() if set(cpus) & set(f.affinity)]
    far = {index: node for index, node in nodes.items() if node not in here}
    for index, node in far.items():
        words = ", ".join(map(str, here)) or "none"
        yield warning(
            f"GPU {index} is on node {node}, this process on {words}", "bind", index=index, here=words, there=node
        )
    if not far:
        yield ok(", ".join(f"GPU {index} on node {node}" for index, node in nodes.items()))


def collective(f: Facts) -> Iterator[Seen]:
    t = f.torch
    if t is None or "import_error" in t or (t.get("ended") and t.get("stage") not in ("gloo", "nccl")):
        yield unknown("torch could not be asked")
        return
    fill = {"python": f.python, "child": t.get("child", "")}
    if t.get("ended"):
        fix = ("nccl" if t["stage"] == "nccl" else "loopback") if t["ended"] == "hung" else "aborts"
        yield error(f"{_STAGES[t['stage']]}: the child {t['ended']} after {t['seconds']:.0f} s", fix, **fill)
        return
    seen = False
    for name, fix in (("gloo", "loopback"), ("nccl", "nccl")):
        result = t.get(name) or {}
        if result.get("error"):
            seen = True
            yield error(f"{name}: {result['error']}", fix, **fill)
        elif result.get("wrong"):
            seen, where = True, f"{name}, {result['wrong']}"
            yield error(f"{where}: the sum is wrong", "wrong", where=where)
        speeds = result.get("pairs") or {}
        usual = sorted(speeds.values())[len(speeds) // 2] if len(speeds) > 2 else 0.0
        for pair, speed in speeds.items():
            if speed < usual / 2:
                seen, where = True, f"{name} between ranks {pair}"
                yield warning(
                    f"{where}: {speed / 1e9:.2f} GB/s, half the pairs have {usual / 1e9:.2f}", "slow", where=where
                )
    if not seen:
        results = [(name, t[name]) for name in ("gloo", "nccl") if t.get(name)]
        words = [f"{name} on {one['ranks']} ranks, {one['bytes_per_second'] / 1e9:.2f} GB/s" for name, one in results]
        yield ok("; ".join(words)) if words else unknown("it was not tried")
