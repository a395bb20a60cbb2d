"""The network interface by which gloo reaches the other nodes, and the files of its connections."""

import ipaddress
import os
import resource
import socket
from collections.abc import Mapping

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
# A group of gloo has a connection to each other rank. Training and rollouts have a group of all
# ranks each; an engine, NCCL and DeepSpeed have others.
_LEAST_FILES_PER_RANK, FILES_PER_RANK = 2, 16
_OTHER_FILES = 1024


class NetworkError(RuntimeError):
    """Processes of several nodes could not reach each other."""


def choose_gloo_interface(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the interface that gloo must use, or None if it detects the right one itself.

    Gloo listens on the address to which the host's name resolves. Where that is a loopback
    address (Debian writes 127.0.1.1 into /etc/hosts), the other nodes cannot reach it, and the
    first object collective fails or waits.

    Args:
        environment: Variables with the launcher's WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR.

    Raises:
        NetworkError: The named interface does not exist, none leads to the other nodes, or the
            first node's address is that of every node.
    """
    num_ranks = int(environment.get("WORLD_SIZE", "1"))
    if int(environment.get("LOCAL_WORLD_SIZE", num_ranks)) >= num_ranks:
        return None  # one node
    _check_first_node(environment)
    addresses = interface_addresses()
    chosen = environment.get(VARIABLE)
    if chosen is not None:
        # The variable may name several; "=" and "^" are prefixes of NCCL's form.
        missing = [name for name in chosen.split(",") if name.strip("=^ ") not in addresses]
        if missing:
            raise NetworkError(
                f"{VARIABLE} names {missing}, which this host does not have: expected some of "
                f"{sorted(addresses)}"
            )
        return None
    local = resolve(socket.gethostname())
    if local is not None and not ipaddress.ip_address(local).is_loopback:
        return None
    leading = address_towards(environment.get("MASTER_ADDR", "localhost"))
    outside = {
        name: held
        for name, held in addresses.items()
        if any(not ipaddress.ip_address(address).is_loopback for address in held)
    }
    for name, held in outside.items():
        if leading in held or len(outside) == 1:
            return name
    raise NetworkError(
        f"this host's name {socket.gethostname()!r} resolves to {local or 'nothing'}, where other "
        f"nodes cannot reach it: set {VARIABLE} on every node to the interface between the nodes, "
        f"one of {sorted(outside)}"
    )


def raise_open_files(wanted: int) -> int | None:
    """Raise this process's soft limit towards a number, as far as the hard limit allows.

    Returns:
        The hard limit; None where there is none.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    reached = wanted if most == unlimited else min(wanted, most)
    if soft != unlimited and soft < reached:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, most))
    return None if most == unlimited else most


def allow_open_files(num_ranks: int) -> None:
    """Allow this process enough open files for the connections to this many ranks.

    By default a process may open 1024, which two groups of 512 ranks go beyond.

    Raises:
        NetworkError: It may not open enough for the groups that every run has.
    """
    wanted, least = _OTHER_FILES + FILES_PER_RANK * num_ranks, _LEAST_FILES_PER_RANK * num_ranks
    most = raise_open_files(wanted)
    if most is not None and most < least:
        raise NetworkError(
            f"{num_ranks} processes need at least {least} connections each: got a limit of {most} "
            f"open files; raise the hard limit of every node to {wanted} (ulimit -Hn, or "
            "LimitNOFILE of the service that starts them)"
        )


def _check_first_node(environment: Mapping[str, str]) -> None:
    """Raise a NetworkError if another node would look for the first one on itself."""
    if int(environment.get("RANK", "0")) < int(environment.get("LOCAL_WORLD_SIZE", "1")):
        return  # the first node may call itself as it likes
    host = environment.get("MASTER_ADDR", "localhost")
    address = resolve(host)
    if address is not None and ipaddress.ip_address(address).is_loopback:
        raise NetworkError(
            f"MASTER_ADDR={host} is this node itself ({address}), on a node other than the first: "
            "set it to an address of the first node that all nodes reach"
        )


def interface_addresses() -> dict[str, set[str]]:
    """Return the addresses of each network interface of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: {entry.address.split("%")[0] for entry in entries if entry.family in families}
        for name, entries in psutil.net_if_addrs().items()
    }


def resolve(host: str) -> str | None:
    """Return the address of a host, or None if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def address_towards(host: str) -> str:
    """Return the address of this host on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
