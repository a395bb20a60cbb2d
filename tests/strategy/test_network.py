"""Gloo listens where the other nodes reach it, or the run ends before it waits."""

import socket
from types import SimpleNamespace

import pytest

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
        monkeypatch.setattr(network, "_resolve", lambda _: own)
        monkeypatch.setattr(network, "_address_towards", lambda _: towards)

    return make


LOOPBACK, ONE, TWO = {"lo": "127.0.0.1"}, {"eth0": "10.0.0.7"}, {"ib0": "10.1.0.7"}


def test_nothing_is_chosen_on_one_node(host):
    host({**LOOPBACK, **ONE}, own="127.0.1.1")
    assert network.choose_gloo_interface({}) is None
    assert network.choose_gloo_interface({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) is None


def test_nothing_is_chosen_where_the_hosts_name_leads_to_it(host):
    host({**LOOPBACK, **ONE, **TWO}, own="10.0.0.7")
    assert network.choose_gloo_interface(TWO_NODES) is None


def test_the_interface_towards_the_first_node_replaces_the_loopback(host):
    host({**LOOPBACK, **ONE, **TWO}, own="127.0.1.1", towards="10.1.0.7")
    assert network.choose_gloo_interface(TWO_NODES) == "ib0"


def test_the_first_node_itself_takes_its_only_interface(host):
    host({**LOOPBACK, **ONE}, own="127.0.1.1", towards="127.0.0.1")
    assert network.choose_gloo_interface(TWO_NODES) == "eth0"


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
    assert "lo" in network._addresses()
    assert network._address_towards("127.0.0.1") == "127.0.0.1"
    assert network._resolve("no-such-host.invalid") is None
