"""Checks of the network: of this host alone, and of all hosts together when `--nodes` has gathered them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.seen import Seen, error, ok, skipped, unknown, warning

_SLOW_NAME_SECONDS = 1.0
_SKEW_SECONDS = 1.0
# Settings that cost speed or flood the log, with the values that do.
_SWITCHES = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_ALGO": None,
    "NCCL_PROTO": None,
    "NCCL_DEBUG": ("INFO", "TRACE", "ABORT"),
    "NCCL_MAX_NCHANNELS": ("1", "2"),
    "NCCL_P2P_LEVEL": ("LOC", "0"),
    "CUDA_LAUNCH_BLOCKING": "1",
}
ALONE = "one host (--nodes compares them all)"


def hostname(f: Facts) -> Iterator[Seen]:
    fill = {"name": f.hostname, "address": f.address, "interface": f.routed["name"] if f.routed else "eth0"}
    if f.own_addresses is None:
        yield warning(f"{f.hostname} has no address: no name server and no line in /etc/hosts", "unknown", **fill)
    elif all(one.startswith("127.") or one == "::1" for one in f.own_addresses):
        level = error if f.hosts else warning
        yield level(f"{f.hostname} leads to {', '.join(f.own_addresses)} alone", "hosts", **fill)
    else:
        yield ok(f"{f.hostname} is {', '.join(f.own_addresses)}")


def reverse_dns(f: Facts) -> Iterator[Seen]:
    slow = {one: seconds for one, seconds in f.reverse_dns_seconds.items() if seconds > _SLOW_NAME_SECONDS}
    if not f.reverse_dns_seconds:
        yield skipped("no address beyond loopback")
    elif slow:
        found = "; ".join(f"{one} took {seconds:.1f} s or more" for one, seconds in slow.items())
        yield warning(found, "hosts")
    else:
        yield ok(f"{', '.join(f.reverse_dns_seconds)}: {max(f.reverse_dns_seconds.values()):.3f} s")


def interfaces(f: Facts) -> Iterator[Seen]:
    if not f.interfaces:
        yield unknown("the interfaces could not be listed")
        return
    up = [one for one in f.interfaces if one["up"] and not one["loopback"] and one["addresses"]]
    routed = f.routed["name"] if f.routed else up[0]["name"] if up else "lo"
    seen = False
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = f.environ.get(variable)
        if not value:
            continue
        usable = [one["name"] for one in f.interfaces if one["up"]]
        if variable.startswith("NCCL"):
            chosen = _nccl_choice(value, usable)
        else:
            words = value.split(",")
            chosen = [one for one in usable if one in words] if set(words) <= set(usable) else []
        if not chosen:
            seen = True
            found = f"{variable}={value} names no interface that is up here ({', '.join(usable)})"
            yield error(found, "set", variable=variable, interface=routed)
        elif f.hosts and all(one.startswith(("lo", "docker", "virbr")) for one in chosen):
            seen = True
            yield error(f"{variable}={value} cannot reach another host", "set", variable=variable, interface=routed)
    if f.hosts and not up:
        seen = True
        yield error("no interface beside loopback is up", "none")
    elif routed.startswith(("docker", "virbr", "veth")) and not seen:
        seen = True
        yield warning(f"the default route leaves by {routed}", "set", variable="GLOO_SOCKET_IFNAME", interface="eth0")
    if not seen:
        names = ", ".join(f"{one['name']} {one['addresses'][0]}" for one in up) or "loopback alone"
        yield ok(names)


def _nccl_choice(value: str, usable: list[str]) -> list[str]:
    """NCCL's own rule: prefixes, `=` for exact names, `^` in front to exclude."""
    exclude, words = value.startswith("^"), value.removeprefix("^")
    exact, words = words.startswith("="), words.removeprefix("=")
    hits = [one for one in usable if any(one == w if exact else one.startswith(w) for w in words.split(",") if w)]
    return [one for one in usable if one not in hits] if exclude else hits


def duplicate_names(f: Facts) -> Iterator[Seen]:
    if not f.hosts:
        yield skipped(ALONE)
        return
    owners: dict[str, list[str]] = {}
    for host, one in f.hosts["hosts"].items():
        owners.setdefault(one["facts"]["hostname"], []).append(host)
    twice = {name: hosts for name, hosts in owners.items() if len(hosts) > 1}
    for name, hosts in twice.items():
        yield error(f"{len(hosts)} hosts call themselves {name}: {', '.join(hosts)}", "rename")
    if not twice:
        yield ok(", ".join(owners))


def ports(f: Facts) -> Iterator[Seen]:
    seen = False
    if f.can_listen:
        seen = True
        yield error(f"no connection to a socket of our own: {f.can_listen}", "bind", address=f.can_listen)
    if f.hosts:
        for one in f.hosts["missing"]:
            seen, head = True, f.hosts["head"]
            arrived = ", ".join(f.hosts["hosts"]) or "none"
            yield error(f"{one} did not come within {f.hosts['seconds']:.0f} s ({arrived} did)", "missing", head=head)
        broken = [f"{host} -> {to}" for host, one in f.hosts["hosts"].items() for to in one.get("unreachable", ())]
        if broken:
            seen = True
            yield error(f"no connection on a fresh port: {', '.join(broken)}", "open", pairs=", ".join(broken))
    if not seen and f.can_listen is None:
        yield unknown("not tried")
    elif not seen:
        yield ok("every two hosts reach each other" if f.hosts else "a fresh port can be listened on")


def mtu(f: Facts) -> Iterator[Seen]:
    sizes = {host: _path(one["facts"], one["address"]) for host, one in (f.hosts or {}).get("hosts", {}).items()}
    here = f.routed
    if f.hosts and len({one["mtu"] for one in sizes.values() if one}) > 1:
        words = ", ".join(f"{host} {one['name']} {one['mtu']}" for host, one in sizes.items() if one)
        least = min(one["mtu"] for one in sizes.values() if one)
        others = ", ".join(host for host, one in sizes.items() if one and one["mtu"] != least)
        yield error(
            f"the hosts differ: {words}", "equal", interface=here["name"] if here else "", mtu=least, hosts=others
        )
    elif here is None:
        yield skipped("no interface beside loopback is up")
    elif here["mtu"] < 1400:
        yield warning(f"{here['name']}: {here['mtu']}", "small", interface=here["name"], mtu=here["mtu"])
    else:
        yield ok(f"{here['name']}: {here['mtu']}")


def _path(facts: Mapping[str, Any], address: str) -> Mapping[str, Any] | None:
    """The interface by which a host came."""
    return next((one for one in facts["interfaces"] if address in one["addresses"]), None)


def clock(f: Facts) -> Iterator[Seen]:
    if not f.hosts:
        yield skipped(ALONE)
        return
    offsets = {host: one["clock_seconds"] for host, one in f.hosts["hosts"].items()}
    off = {host: seconds for host, seconds in offsets.items() if abs(seconds) > _SKEW_SECONDS}
    if off:
        words = ", ".join(f"{host} {seconds:+.1f} s" for host, seconds in off.items())
        yield warning(f"against {f.hostname}: {words}", "ntp", hosts=", ".join(off))
    else:
        yield ok(f"within {max([abs(one) for one in offsets.values()], default=0):.3f} s")


def versions(f: Facts) -> Iterator[Seen]:
    if not f.hosts:
        yield skipped(ALONE)
        return
    seen = False
    hosts = {host: one["facts"] for host, one in f.hosts["hosts"].items()}
    told: dict[str, dict[str, Any]] = {}
    for host, facts in hosts.items():
        values = {**facts["packages"], "driver": facts["kernel_driver"], "commit": facts["commit"]}
        for name, value in values.items():
            told.setdefault(name, {})[host] = value
    for name, values in told.items():
        every = {host: values.get(host) for host in hosts}
        if len(set(every.values())) > 1:
            seen = True
            words = ", ".join(f"{host} {value or 'none'}" for host, value in every.items())
            level = warning if name in ("commit", "numpy", "pynvml", "nvidia-ml-py") else error
            yield level(f"{name}: {words}", "same", names=name)
    if not seen:
        yield ok(", ".join(f"{name} {next(iter(values.values()))}" for name, values in told.items() if any(values)))


@cache
def _known_names() -> frozenset[str]:
    text = resources.files("evener.doctor").joinpath("nccl_names.txt").read_text(encoding="ascii")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def nccl_variables(f: Facts) -> Iterator[Seen]:
    settings = [(name, value, "") for name, value in f.environ.items()]
    for path, lines in f.nccl_files.items():
        settings += [(name.strip(), value.strip(), path) for name, _, value in (line.partition("=") for line in lines)]
    seen = False
    for name, value, file in settings:
        if name.startswith("NCCL_") and name not in _known_names():
            seen = True
            close = next(iter(difflib.get_close_matches(name, _known_names(), 1, 0.85)), None)
            fill = {"name": name, "near": close, "value": value}
            yield warning(f"{name}={value} is no setting of NCCL", "spelling" if close else "unknown", **fill)
        elif name in _SWITCHES and ((bad := _SWITCHES[name]) is None or value.upper() in bad):
            seen, where = True, f" in {file}" if file else ""
            yield warning(f"{name}={value}{where}", "conf" if file else "unset", name=name, file=file)
    if not seen:
        count = sum(bool(re.match(r"(TORCH_)?NCCL_", name)) for name, _, _ in settings)
        yield ok(f"{count or 'no'} setting{'s' * (count != 1)}, none of them harmful")


def infiniband(f: Facts) -> Iterator[Seen]:
    if not f.infiniband:
        yield skipped("no InfiniBand here")
        return
    seen = False
    for port in f.infiniband:
        if port["state"] != "ACTIVE":
            seen = True
            yield warning(f"{port['device']} port {port['port']} is {port['state']}", "port", **port)
    if f.ibverbs is False:
        seen = True
        yield warning("InfiniBand is there and libibverbs is not: NCCL will use sockets", "library")
    if not seen:
        yield ok(", ".join(f"{port['device']}:{port['port']} {port['state']}" for port in f.infiniband))
