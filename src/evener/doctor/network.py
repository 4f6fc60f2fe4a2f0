"""Checks of the network: of this host alone, and of all hosts together when `--nodes` has gathered them."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.host import known
from evener.doctor.seen import Faults, Skipped, error, warning
from evener.launch.meeting import is_loopback

_SLOW_NAME_SECONDS, _SKEW_SECONDS, _SMALL_MTU = 1.0, 1.0, 1400
_NOT_OUTWARD = ("lo", "docker", "virbr", "veth")
# Settings that cost speed or flood the log, with the values that do; None: any value.
_SWITCHES: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING"), ("1",)),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), ("0",)),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO")),
    "NCCL_DEBUG": ("INFO", "TRACE", "ABORT"),
    "NCCL_MAX_NCHANNELS": ("1", "2"),
    "NCCL_P2P_LEVEL": ("LOC", "0"),
}


def together(f: Facts) -> dict[str, Any]:
    """The hosts of --nodes by name; a check that compares them ends here without."""
    if not f.hosts:
        raise Skipped("one host (--nodes compares them all)")
    return dict(f.hosts["hosts"])


def hostname(f: Facts) -> Faults:
    routed, own, name = f.routed, known(f.own_addresses, "its address"), f.hostname
    if not own:
        fill = {"name": name, "address": "127.0.0.1" if f.address == "ADDRESS" else f.address}
        yield warning(f"{name} has no address: no name server and no line in /etc/hosts", "unknown", **fill)
        return ""
    said = f"{name} leads to {', '.join(own)}"
    if not all(is_loopback(one) for one in own):
        return said
    if not f.hosts and is_loopback(f.environ.get("MASTER_ADDR", "localhost")):
        return f"{said} alone: enough for one machine"
    fill = {"name": name, "address": f.address, "loopback": own[0], "interface": routed["name"] if routed else ""}
    yield (error if f.hosts else warning)(f"{said} alone", "hosts" if f.address != "ADDRESS" else "no-route", **fill)
    return ""


def reverse_dns(f: Facts) -> Faults:
    if not f.reverse_dns_seconds:
        raise Skipped("no address beyond loopback")
    slow = {one: seconds for one, seconds in f.reverse_dns_seconds.items() if seconds > _SLOW_NAME_SECONDS}
    if slow:
        yield warning("; ".join(f"{one} took {seconds:.1f} s or more" for one, seconds in slow.items()), "hosts")
    return f"{', '.join(f.reverse_dns_seconds)}: {max(f.reverse_dns_seconds.values()):.3f} s"


def interfaces(f: Facts) -> Faults:
    usable = [one["name"] for one in known(f.interfaces or None, "the interfaces") if one["up"]]
    up = [one for one in f.interfaces if one["up"] and not one["loopback"] and one["addresses"]]
    routed = f.routed["name"] if f.routed else up[0]["name"] if up else "lo"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if not (value := f.environ.get(variable)):
            continue
        words = value.split(",")
        chosen = [one for one in usable if one in words] if set(words) <= set(usable) else []
        if variable.startswith("NCCL"):
            chosen = _nccl_choice(value, usable)
        if not chosen:
            found = f"{variable}={value} names no interface that is up here ({', '.join(usable)})"
            yield error(found, "set", variable=variable, interface=routed)
        elif f.hosts and all(one.startswith(_NOT_OUTWARD) for one in chosen):
            yield error(f"{variable}={value} cannot reach another host", "set", variable=variable, interface=routed)
    if f.hosts and not up:
        yield error("no interface beside loopback is up", "none")
    elif up and routed.startswith(_NOT_OUTWARD):
        yield warning(f"the default route leaves by {routed}", "set", variable="GLOO_SOCKET_IFNAME", interface="eth0")
    return ", ".join(f"{one['name']} {one['addresses'][0]}" for one in up) or "loopback alone"


def _nccl_choice(value: str, usable: list[str]) -> list[str]:
    """NCCL's own rule: prefixes, `=` for exact names, `^` in front to exclude."""
    exclude, words = value.startswith("^"), value.removeprefix("^")
    exact, words = words.startswith("="), words.removeprefix("=")
    hits = [one for one in usable if any(one == w if exact else one.startswith(w) for w in words.split(",") if w)]
    return [one for one in usable if one not in hits] if exclude else hits


def duplicate_names(f: Facts) -> Faults:
    owners: dict[str, list[str]] = {}
    for host, one in together(f).items():
        owners.setdefault(one["facts"]["hostname"], []).append(host)
    for name, hosts in owners.items():
        if len(hosts) > 1:
            yield error(f"{len(hosts)} hosts call themselves {name}: {', '.join(hosts)}", "rename")
    return ", ".join(owners)


def ports(f: Facts) -> Faults:
    if problem := known(f.can_listen, "a socket"):
        yield error(f"no connection to a socket of our own: {problem}", "bind", address=problem)
    if f.hosts:
        for one in f.hosts["missing"]:
            found = f"{one} did not come within {f.hosts['seconds']:g} s ({', '.join(f.hosts['hosts'])} did)"
            yield error(found, "missing", head=f.hosts["head"])
        hosts = f.hosts["hosts"].items()
        if broken := ", ".join(f"{host} -> {to}" for host, one in hosts for to in one.get("unreachable", ())):
            yield error(f"no connection on a fresh port: {broken}", "open", pairs=broken)
    return "every two hosts reach each other" if f.hosts else "a fresh port can be listened on"


def mtu(f: Facts) -> Faults:
    paths: dict[str, Any] = {}  # the interface by which each host came
    for host, one in (f.hosts or {}).get("hosts", {}).items():
        paths |= [(host, way) for way in one["facts"]["interfaces"] if one["address"] in way["addresses"]]
    least = min((way["mtu"] for way in paths.values()), default=0)
    if others := [host for host, way in paths.items() if way["mtu"] != least]:
        words = ", ".join(f"{host} {way['name']} {way['mtu']}" for host, way in paths.items())
        fill = {"interface": paths[others[0]]["name"], "mtu": least, "hosts": ", ".join(others)}
        yield error(f"the hosts differ: {words}", "equal", **fill)
    if f.routed is None:
        raise Skipped("no interface beside loopback is up")
    found = f"{f.routed['name']}: {f.routed['mtu']}"
    if f.routed["mtu"] < _SMALL_MTU:
        yield warning(found, "small", interface=f.routed["name"], mtu=f.routed["mtu"])
    return found


def clock(f: Facts) -> Faults:
    offsets = {host: one["clock_seconds"] for host, one in together(f).items()}
    off = {host: seconds for host, seconds in offsets.items() if abs(seconds) > _SKEW_SECONDS}
    if off:
        words = ", ".join(f"{host} {seconds:+.1f} s" for host, seconds in off.items())
        yield warning(f"against {f.hostname}: {words}", "ntp", hosts=", ".join(off))
    return f"within {max(map(abs, offsets.values())):.3f} s"


def versions(f: Facts) -> Faults:
    hosts = {host: one["facts"] for host, one in together(f).items()}
    told = {
        host: {**one["packages"], "driver": one["kernel_driver"], "commit": one["commit"]}
        for host, one in hosts.items()
    }
    same = []
    for name in dict.fromkeys(name for values in told.values() for name in values):
        every = {host: values.get(name) for host, values in told.items()}
        if len(set(every.values())) > 1:
            words = ", ".join(f"{host} {value or 'none'}" for host, value in every.items())
            harmless = name in ("commit", "numpy", "pynvml", "nvidia-ml-py")
            yield (warning if harmless else error)(f"{name}: {words}", "same", names=name)
        elif value := next(iter(every.values())):
            same.append(f"{name} {value}")
    return ", ".join(same)


@cache
def _known_names() -> frozenset[str]:
    text = resources.files("evener.doctor").joinpath("nccl_names.txt").read_text(encoding="ascii")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def nccl_variables(f: Facts) -> Faults:
    settings = [(name, value, "") for name, value in f.environ.items()]
    for path, lines in f.nccl_files.items():
        settings += [(name.strip(), value.strip(), path) for name, _, value in (line.partition("=") for line in lines)]
    for name, value, file in settings:
        if name.startswith("NCCL_") and name not in _known_names():
            close = next(iter(difflib.get_close_matches(name, _known_names(), 1, 0.85)), None)
            fill = {"name": name, "near": close, "value": value}
            yield warning(f"{name}={value} is no setting of NCCL", "spelling" if close else "unknown", **fill)
        elif name in _SWITCHES and ((bad := _SWITCHES[name]) is None or value.upper() in bad):
            where = f" in {file}" if file else ""
            yield warning(f"{name}={value}{where}", "conf" if file else "unset", name=name, file=file)
    return "none of the settings is harmful"


def infiniband(f: Facts) -> Faults:
    if not f.infiniband:
        raise Skipped("no InfiniBand here")
    for port in f.infiniband:
        if port["state"] != "ACTIVE":
            yield warning(f"{port['device']} port {port['port']} is {port['state']}", "port", **port)
    if f.ibverbs is False:
        yield warning("InfiniBand is there and libibverbs is not: NCCL will use sockets", "library")
    return ", ".join(f"{port['device']}:{port['port']} {port['state']}" for port in f.infiniband)
