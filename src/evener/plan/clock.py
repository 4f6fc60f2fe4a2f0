"""How long one update of a trace takes on a kind of GPU: a roofline per operation, the host's pace, three streams.

    t(operation)  = start + max(flops / (peak[dtype] * e_matmul), bytes / (bandwidth * e_memory))
                    on a CPU a result of 32 MiB or more is in memory that the kernel just handed out: + bytes / fresh
    t(update)     = end of the last of three streams, but not before the host has dispatched everything:
                    operations run on one stream, collectives on another, copies of offloaded activations over PCIe on
                    a third; each starts where the step starts it, and what waits for it waits. Under fsdp the gather
                    of the next block starts when this block starts.
    t(collective) = on n ranks of one node, ring: all-gather, reduce-scatter (n-1)/n * B/w + (n-1) * a; all-reduce
                    twice that; over m nodes of g ranks: the same for g inside, and for m outside with B/g per GPU

Every constant comes from `evener.facts` with its range, or from a calibration of this kind of GPU. What a sheet does
not say makes the time unknown (None), with the reason: never another GPU's figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evener import facts
from evener.facts import GpuKind
from evener.plan.captured import Captured
from evener.plan.values import Collective, Cut, Op, Trace

_PEAKS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_US = 1e-6
_MAPPED = 32 << 20  # bytes from which on the C library returns what is freed to the kernel, see mallopt(3)
_COPIES = ("to_host", "to_device")


@dataclass(frozen=True)
class DataRate:
    """Rows per second that one process got of a dataset, by number of data workers, and on what."""

    rows_per_second: Mapping[int, float]
    cores: int
    cpu: str

    def of(self, ranks: int, workers: int | None) -> tuple[float, int]:
        """(rows/s of so many ranks of one machine, workers of each). Workers None: the automatic number."""
        workers = min(4, self.cores // ranks) if workers is None else workers
        if workers == 0:
            return min(ranks, self.cores) * self.rows_per_second[0], 0
        return self.rows_per_second[max(n for n in self.rows_per_second if n <= ranks * workers)], workers


@dataclass(frozen=True)
class Machine:
    """The devices that a plan is for.

    gpus: Per node; on the CPU, processes. kind: None where nothing is known of one. capacity_bytes: What one rank may
    use. nvlink: Whether collectives inside a node go over NVLink; None: assumed where the sheet has links that are made
    for whole boards, and said. calibration: Measured efficiencies of this kind; empty: the shipped ranges.
    data: Measured rows/s, by dataset.
    """

    device: str
    name: str
    capacity_bytes: int
    capacity_from: str
    gpus: int = 1
    nodes: int = 1
    kind: GpuKind | None = None
    nvlink: bool | None = None
    calibration: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, DataRate] = field(default_factory=dict)

    def neighbours(self) -> Iterator[Machine]:
        """With one GPU (process) more, and one less; of several nodes with one node more, and one less."""
        for by in (1, -1):
            if self.nodes > 1:
                yield replace(self, nodes=self.nodes + by)
            elif (count := self.gpus + by) and self.device == "cuda":
                yield replace(self, gpus=count)
            elif count:  # processes share the CPU and its memory
                part, kind = self.gpus / count, self.kind
                if kind is not None:
                    peak = {name: rate * part for name, rate in kind.peak.items()}
                    kind = replace(kind, peak=peak, memory_bandwidth=(kind.memory_bandwidth or 0) * part or None)
                yield replace(self, gpus=count, kind=kind, capacity_bytes=int(self.capacity_bytes * part))

    @property
    def kind_name(self) -> str:
        return self.kind.name if self.kind is not None else self.device

    @property
    def capability(self) -> tuple[int, int] | None:
        text = self.kind.compute_capability if self.kind is not None else None
        return (int(text.split(".")[0]), int(text.split(".")[1])) if text else None

    @property
    def links(self) -> tuple[str, float | None]:
        """The path between GPUs of one node and its bytes/s in one direction: ("nvlink", ...) or ("pcie", ...)."""
        kind = self.kind
        if kind is None:
            return "pcie", None
        boards = kind.nvlink_bandwidth is not None and kind.nvlink_bandwidth >= 100e9  # less is a bridge for pairs
        if kind.nvlink_bandwidth is not None and (boards if self.nvlink is None else self.nvlink):
            return "nvlink", kind.nvlink_bandwidth
        return "pcie", kind.pcie_bandwidth


@dataclass(frozen=True)
class Pace:
    """One end of every range together: "low" is the fastest (best efficiency), "high" the slowest."""

    matmul: float
    memory: float
    network: float
    launch: float
    internode: float
    fresh: float | None = None  # bytes/s, on the CPU

    @staticmethod
    def of(end: str, calibration: Mapping[str, Any]) -> Pace:
        table = facts.overheads()
        good = {"low": "high", "mid": "mid", "high": "low"}[end]  # a high efficiency is a short time

        def efficiency(name: str) -> float:
            measured = calibration.get(name)
            # A measurement on this kind replaces the range; what is left is how much steps differ from benchmarks.
            spread = {"low": 1.1, "mid": 1.0, "high": 0.5 if "fresh" in calibration else 0.8}[end]
            return float(measured) * spread if measured else float(table["efficiency"][name][good])

        return Pace(
            matmul=efficiency("matmul"),
            memory=efficiency("memory"),
            network=efficiency("network"),
            # Python between operations, of modules and of the engine, is in no benchmark: 3 times as much was seen.
            launch=float(calibration.get("launch_us", 0) * (4 if end == "high" else 1) or table["launch"][end]) * _US,
            internode=float(calibration.get("internode_gb_per_s") or table["internode"][good]) * 1e9,
            fresh=efficiency("fresh") if calibration.get("fresh") else None,
        )


@dataclass(frozen=True)
class Seconds:
    """Time of one update; None where it is unknown, with the reasons."""

    low: float | None
    mid: float | None
    high: float | None
    because: tuple[str, ...] = ()


def seconds(trace: Trace, machine: Machine, *, tf32: bool = False) -> Seconds:
    """Time of one steady update of the traced cut, without data loading (`with_data`)."""
    unknown = _unknown(trace, machine, tf32)
    if unknown:
        return Seconds(None, None, None, unknown)
    ends = {end: _update(trace, machine, Pace.of(end, machine.calibration), tf32) for end in ("low", "mid", "high")}
    notes = ["calibrated"] if machine.calibration else ["efficiencies of the shipped table, not measured here"]
    path, _ = machine.links
    if trace.cut.ranks > 1 and machine.gpus > 1 and machine.nvlink is None:
        notes.append(f"GPUs of a node are assumed to be connected by {'NVLink' if path == 'nvlink' else 'PCIe'}")
    if trace.cut.ranks > machine.gpus and not machine.calibration.get("internode_gb_per_s"):
        notes.append("the network between nodes is a guess of 3 to 50 GB/s per GPU")
    return Seconds(ends["low"], ends["mid"], ends["high"], tuple(notes))


def with_data(
    took: Seconds, cut: Cut, machine: Machine, captured: Captured
) -> tuple[Seconds, float | None, str | None]:
    """Time with the rows' reading, which is hidden behind the step or hides it; the reading's; which one bounds it.

    t = max(t(update), rows / rate), and their sum where the CPU that computes reads the rows, without data workers
    """
    known = machine.data.get(captured.dataset)
    if known is None:
        why = "data loading is not in the time: its rate was not measured for this dataset"
        how = "`evener bench data --dataset FILE.py:NAME --calibrate` does"
        return replace(took, because=(*took.because, f"{why} ({how})")), None, None
    rate, workers = known.of(max(1, cut.world_size // machine.nodes), captured.num_workers)
    data = captured.global_batch_size / (rate * machine.nodes)
    said = f"{rate:,.0f} rows/s a machine with {workers} data workers a rank, measured on {known.cpu}"
    took = replace(took, because=(*took.because, f"data: {said}"))
    if took.low is None or took.mid is None or took.high is None:
        return took, data, None
    serial = machine.device != "cuda" and workers == 0
    low, mid, high = (
        seconds + reading if serial else max(seconds, reading)
        for seconds, reading in ((took.low, data / 1.1), (took.mid, data), (took.high, data / 0.8))
    )
    return Seconds(low, mid, high, took.because), data, "data" if data > took.mid else "compute"


def _unknown(trace: Trace, machine: Machine, tf32: bool) -> tuple[str, ...]:
    kind = machine.kind
    if machine.device != "cuda" and kind is None:
        return ("time on this CPU is not known: `evener bench --cpu --calibrate` measures it",)
    if kind is None or not kind.memory_bandwidth:
        return (f"no speeds are known of {machine.name}",)
    names = {_peak_name(one, tf32) for one in trace.steady() if isinstance(one, Op) and one.flops}
    lacks = sorted(name for name in names if name not in kind.peak)
    reasons = [f"{kind.name} has no known peak for {name}" for name in lacks]
    if trace.cut.ranks > 1 and machine.gpus > 1 and machine.links[1] is None:
        reasons.append(f"no bandwidth between GPUs is known of {kind.name}")
    if kind.pcie_bandwidth is None and any(getattr(one, "kind", "") in _COPIES for one in trace.steady()):
        reasons.append(f"no PCIe bandwidth is known of {kind.name}, over which activations are offloaded")
    return tuple(reasons)


def _peak_name(one: Op, tf32: bool) -> str:
    if ("flash_attention" in one.name and "for_cpu" not in one.name) or "cudnn_attention" in one.name:
        return "fp16"  # these kernels have 16-bit inputs; only their statistics are fp32. bf16 is as fast
    name = _PEAKS.get(one.dtype, one.dtype)
    return "tf32" if tf32 and name == "fp32" and one.shape else name


def operation_seconds(one: Op, kind: GpuKind, pace: Pace, tf32: bool = False) -> float:
    """The device's time for one operation: its start, and the slower of computing and moving."""
    assert kind.memory_bandwidth is not None
    moving = (one.bytes_read + one.bytes_written) / (kind.memory_bandwidth * pace.memory)
    if pace.fresh and one.bytes_written >= _MAPPED and "_." not in one.name:
        moving += one.bytes_written / pace.fresh
    computing = one.flops / (kind.peak[_peak_name(one, tf32)] * pace.matmul) if one.flops else 0.0
    return 2 * _US + max(moving, computing)


def collective_seconds(one: Collective, cut: Cut, machine: Machine, pace: Pace) -> float:
    """Ring times on the topology; a group with several nodes goes around inside of each, and between them."""
    if one.kind in _COPIES:
        assert machine.kind is not None and machine.kind.pcie_bandwidth is not None
        return one.bytes / (machine.kind.pcie_bandwidth * pace.memory)
    inside = min(one.group, machine.gpus)
    if cut.strategy == "hsdp" and one.group == cut.replicas != cut.world_size:
        inside = min(one.group, max(1, machine.gpus // max(1, cut.world_size // cut.replicas)))  # far apart in rank
    nodes = -(-one.group // inside)
    path, bandwidth = machine.links
    alpha = facts.overheads()["alpha"]
    total = 0.0
    if inside > 1 and bandwidth is not None:
        total += _ring(one, inside, one.bytes, bandwidth * pace.network, alpha[path] * _US)
    if nodes > 1:
        total += _ring(one, nodes, one.bytes / inside, pace.internode * pace.network, alpha["network"] * _US)
    return total


def _ring(one: Collective, ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    turns = 2 if one.kind == "all_reduce" else 1
    share = 1.0 if one.kind == "broadcast" else (ranks - 1) / ranks
    return turns * (share * size / bandwidth + (ranks - 1) * alpha)


def _update(trace: Trace, machine: Machine, pace: Pace, tf32: bool) -> float:
    times = [_piece(events, trace.cut, machine, pace, tf32) for events in _pieces(trace)]
    repeated = times[-2] if len(times) > 1 else times[0] / trace.pieces
    return sum(times) + (trace.cut.microbatches - trace.pieces) * repeated


def _pieces(trace: Trace) -> Iterator[list[Op | Collective]]:
    """The steady update's timed events, one list a microbatch; reduction and optimizer go with the last."""
    now: list[Op | Collective] = []
    past, done = "", 0
    for one in trace.steady():
        if not isinstance(one, Op | Collective):
            continue
        if past == "backward" and one.phase == "forward" and done < trace.pieces - 1:
            yield now
            now, done = [], done + 1
        past = one.phase
        now.append(one)
    yield now


def _piece(events: list[Op | Collective], cut: Cut, machine: Machine, pace: Pace, tf32: bool) -> float:
    """When the last stream is done, and the host."""
    kind = machine.kind
    assert kind is not None
    compute = network = copied = host = gathered = 0.0
    past = ""
    for one in events:
        if past != one.phase and one.phase == "optimizer":
            compute = max(compute, network, copied)  # gradients have arrived
        past = one.phase
        if isinstance(one, Op):
            host += pace.launch
            behind = machine.device != "cuda"  # the host computes itself
            compute = (compute + pace.launch if behind else max(compute, host)) + operation_seconds(
                one, kind, pace, tf32
            )
            continue
        if one.kind in _COPIES:
            copied = max(copied, compute) + collective_seconds(one, cut, machine, pace)
            continue
        prefetched = one.kind == "all_gather" and cut.strategy in ("fsdp", "hsdp")
        start = max(network, gathered if prefetched else compute)
        network = start + collective_seconds(one, cut, machine, pace)
        if prefetched or one.waits:
            compute = max(compute, network)
        if prefetched:
            gathered = compute
    return max(compute, network, copied, host)
