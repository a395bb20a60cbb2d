"""Gloo listens where the other nodes reach it, or the run ends before it waits."""

import os
import resource
import socket
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.strategy.distributed import network

TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "first"}


@pytest.fixture
def host(monkeypatch):
    """A host with given interfaces, whose name resolves to `own`."""

    def make(interfaces, *, own, towards="127.0.0.1"):
        entries = {
            name: [SimpleNamespace(family=socket.AF_INET, address=address)]
            for name, address in interfaces.items()
        }
        monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: entries)
        # Private: what the host says of itself is the input of these tests.
        monkeypatch.setattr(network, "resolve", lambda _: own)
        monkeypatch.setattr(network, "address_towards", lambda _: towards)

    return make


LOOPBACK, ONE, TWO = {"lo": "127.0.0.1"}, {"eth0": "10.0.0.7"}, {"ib0": "10.1.0.7"}


ONE_NODE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "interfaces, own, towards, environment, chosen",
    [
        pytest.param(ONE, "127.0.1.1", "127.0.0.1", {}, None, id="no launcher"),
        pytest.param(ONE, "127.0.1.1", "127.0.0.1", ONE_NODE, None, id="one node"),
        pytest.param(
            ONE | TWO, "10.0.0.7", "127.0.0.1", TWO_NODES, None, id="its name leads to it"
        ),
        pytest.param(ONE | TWO, "127.0.1.1", "10.1.0.7", TWO_NODES, "ib0", id="towards the first"),
        pytest.param(ONE, "127.0.1.1", "127.0.0.1", TWO_NODES, "eth0", id="the only one"),
    ],
)
def test_gloo_takes_the_interface_that_other_nodes_reach(
    host, interfaces, own, towards, environment, chosen
):
    host({**LOOPBACK, **interfaces}, own=own, towards=towards)
    assert network.choose_gloo_interface(environment) == chosen


def test_a_choice_that_cannot_be_made_is_the_users(host):
    host({**LOOPBACK, **ONE, **TWO}, own="127.0.1.1")
    with pytest.raises(network.NetworkError, match=r"set GLOO_SOCKET_IFNAME .*\['eth0', 'ib0'\]"):
        network.choose_gloo_interface(TWO_NODES)


def test_the_users_choice_must_exist(host):
    host({**LOOPBACK, **ONE}, own="127.0.1.1")
    chosen = {**TWO_NODES, network.VARIABLE: "eth0"}
    assert network.choose_gloo_interface(chosen) is None
    with pytest.raises(network.NetworkError, match=r"names \['eth9'\]"):
        network.choose_gloo_interface({**chosen, network.VARIABLE: "eth9"})


def test_only_the_first_node_may_be_called_by_loopback(host):
    host({**LOOPBACK, **ONE}, own="127.0.1.1")
    assert network.choose_gloo_interface({**TWO_NODES, "RANK": "1"}) == "eth0"
    with pytest.raises(network.NetworkError, match="MASTER_ADDR=first is this node itself"):
        network.choose_gloo_interface({**TWO_NODES, "RANK": "2"})


def test_this_host_can_be_asked():
    # Private: the other tests replace these three; here they ask this host.
    assert "lo" in network.interface_addresses()
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.resolve("no-such-host.invalid") is None


def limits(monkeypatch, own, most):
    """The limits of a process, and those that it has set."""
    found = []
    monkeypatch.setattr(network.resource, "getrlimit", lambda _: (own, most))
    monkeypatch.setattr(network.resource, "setrlimit", lambda _, pair: found.append(pair))
    return found


@pytest.mark.parametrize(
    "own, most, raised",
    [
        (1024, 1_048_576, [(9216, 1_048_576)]),
        (1024, resource.RLIM_INFINITY, [(9216, resource.RLIM_INFINITY)]),
        (1024, 4096, [(4096, 4096)]),
        (65_536, 1_048_576, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_512_ranks_may_open_files_for_their_connections(monkeypatch, own, most, raised):
    found = limits(monkeypatch, own, most)
    network.allow_open_files(512)
    assert found == raised


def test_a_hard_limit_below_the_connections_is_an_error_with_what_to_do(monkeypatch):
    limits(monkeypatch, 512, 1000)
    with pytest.raises(network.NetworkError, match=r"1024 connections each: got a limit of 1000"):
        network.allow_open_files(512)


def groups_with_few_files(rank, world_size):
    """Makes groups with room for one more file, of which each takes several."""
    from lightrft.strategy.distributed import process_groups

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 3, most))
    process_groups.start_process_group(None)
    process_groups.separate_group(None, timeout=process_groups.DEFAULT_TIMEOUT)
    taken = len(os.listdir("/proc/self/fd")) - before
    torch.distributed.barrier()  # a rank that ended would cut off one that still connects
    return taken


def test_ranks_connect_although_few_files_may_be_open_at_first():
    taken = run_multiprocess(groups_with_few_files, 3, timeout_seconds=120)
    assert min(taken) > 3
    assert max(taken) < 3 * network.FILES_PER_RANK
