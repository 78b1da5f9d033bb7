"""Addresses: what is one, and which of its own a peer announces."""

import pytest

from swarm.errors import UsageError
from swarm.net import addresses
from swarm.net.addresses import Address, announced, interface_addresses, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("203.0.113.7:4001", "203.0.113.7", 4001),
        ("[2001:db8::0:7]:4001", "2001:db8::7", 4001),
        ("peer-7.example.org:0", "peer-7.example.org", 0),
        (" localhost:65535 ", "localhost", 65535),
    ],
)
def test_hosts_and_ports_are_read(text, host, port):
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address


def test_ipv6_is_written_in_brackets():
    assert str(Address("::1", 7)) == "[::1]:7"


def test_a_missing_port_is_the_default():
    assert parse_address("example.org", default_port=7) == Address("example.org", 7)
    assert parse_address("[::1]", default_port=7) == Address("::1", 7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("example.org", "the port is missing"),
        ("::1:4001", "needs brackets"),
        ("[::1:4001", "do not hold"),
        ("[1.2.3.4]:1", "do not hold"),
        ("[::1]4001", "follows the bracket"),
        ("1.2.3.4:70000", "is not a port"),
        ("1.2.3.4:", "is not a port"),
        ("1.2.3.4:-1", "is not a port"),
        ("1.2.3.400:1", "is not an IPv4 address"),
        ("-x.org:1", "neither an IP address nor a name"),
        (":1", "neither an IP address nor a name"),
        ("a b:1", "neither an IP address nor a name"),
        ("unix:/tmp/x:1", "needs brackets"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text, reason):
    with pytest.raises(UsageError, match=reason):
        parse_address(text)


def test_loopback_and_wildcard_are_recognised():
    assert all(parse_address(text).is_loopback for text in ("127.0.0.9:1", "[::1]:1", "localhost:1"))
    assert all(parse_address(text).is_wildcard for text in ("0.0.0.0:1", "[::]:1"))
    assert not parse_address("example.org:1").is_loopback


def test_loopback_is_announced_in_a_local_run_only():
    assert announced(["127.0.0.1:5"], None, local=True) == ["127.0.0.1:5"]
    with pytest.raises(UsageError, match="can be reached"):
        announced(["127.0.0.1:5", "[::1]:6"], None, local=False)


def test_a_wildcard_becomes_the_addresses_of_the_interfaces(monkeypatch):
    monkeypatch.setattr(addresses, "interface_addresses", lambda *families: ["192.168.7.7"])
    assert announced(["0.0.0.0:5"], None, local=False) == ["192.168.7.7:5"]
    assert announced(["0.0.0.0:5", "[::]:5"], None, local=True) == ["127.0.0.1:5", "[::1]:5"]


def test_the_announced_address_replaces_the_bound_ones():
    assert announced(["0.0.0.0:5"], "router.example:9, [2001:db8::7]", local=False) == [
        "router.example:9",
        "[2001:db8::7]:5",
    ]


@pytest.mark.parametrize("text", ["localhost:5", "127.0.0.1:5", "0.0.0.0:5", "[::]:5", "example.org:0"])
def test_what_nobody_can_reach_is_never_announced(text):
    with pytest.raises(UsageError):
        announced(["0.0.0.0:5"], text, local=False)


def test_interface_addresses_are_never_loopback():
    assert not any(Address(host, 1).is_loopback or Address(host, 1).is_wildcard for host in interface_addresses())
