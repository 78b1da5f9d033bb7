"""Addresses: ``host:port`` with IPv4, IPv6 in brackets, or a name; and which of its own a peer tells others."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.errors import UsageError

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
MAX_NAME_CHARACTERS = 253
MAX_ADDRESSES = 16
"""Addresses that one peer may announce."""

# Documentation prefixes (RFC 5737, RFC 3849): routed like any far address, never the address of anybody.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a server listens. ``host`` is an IPv4 address, an IPv6 address without brackets, or a name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Every interface: fine to listen on, impossible to connect to from elsewhere."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """Reachable from the same machine only."""
        ip = _ip(self.host)
        return ip.is_loopback if ip is not None else self.host.rstrip(".").lower().split(".")[-1] == "localhost"


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Read ``host:port``, ``[v6]:port`` or ``name:port``; a missing port is ``default_port``.

    Raises:
        UsageError: says what is wrong with ``text``.
    """
    text = text.strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or _ip(host) is None or ":" not in host:
            raise _bad(text, "the brackets do not hold an IPv6 address")
        if rest and not rest.startswith(":"):
            raise _bad(text, f"{rest!r} follows the bracket")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        raise _bad(text, "an IPv6 address needs brackets, as in [::1]:4001")
    else:
        host, colon, rest = text.partition(":")
        port = rest if colon else None
    if port is None:
        if default_port is None:
            raise _bad(text, "the port is missing")
        number = default_port
    elif not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _bad(text, f"{port!r} is not a port (0 to 65535)")
    else:
        number = int(port)
    ip = _ip(host)
    if ip is not None:
        return Address(str(ip), number)
    if len(host) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(host):
        raise _bad(text, f"{host!r} is neither an IP address nor a name")
    if re.fullmatch(r"[0-9.]+", host):
        raise _bad(text, f"{host!r} is not an IPv4 address")
    return Address(host, number)


def announced(bound: Iterable[str], announce: str | None, local: bool) -> list[str]:
    """The addresses that a peer tells others.

    Args:
        bound: where its server listens, ports known.
        announce: what the user wants announced instead, comma separated (a router's address, a name); a missing port
            is that of the first bound address.
        local: all peers of the run are on this machine, so loopback is what they can use.

    Raises:
        UsageError: nothing is left that others could connect to.
    """
    listening = [parse_address(text) for text in bound]
    chosen: list[Address] = []
    if announce:
        for text in announce.split(","):
            address = parse_address(text, default_port=listening[0].port if listening else None)
            if address.port == 0:
                raise _bad(text, "others cannot connect to port 0")
            if address.is_wildcard or (address.is_loopback and not local):
                raise UsageError(
                    f"{address} cannot be announced: it means this machine to whoever reads it.",
                    remedy="Announce an address that others can reach, or mark the run as local.",
                )
            chosen.append(address)
    else:
        for address in listening:
            if address.is_wildcard:
                # A gRPC server on [::] takes IPv4 connections too.
                six = ":" in address.host
                families = (socket.AF_INET, socket.AF_INET6) if six else (socket.AF_INET,)
                if local:
                    chosen.append(Address("::1" if six else "127.0.0.1", address.port))
                else:
                    chosen += [Address(host, address.port) for host in interface_addresses(*families)]
            elif local or not address.is_loopback:
                chosen.append(address)
    if not chosen:
        raise UsageError(
            f"No address of {', '.join(map(str, listening)) or 'this peer'} can be reached by others.",
            meaning="Other peers could not connect to this one.",
            remedy="Listen on 0.0.0.0 or [::] and give --announce HOST:PORT, or mark the run as local.",
        )
    return [str(address) for address in dict.fromkeys(chosen)][:MAX_ADDRESSES]


def interface_addresses(*families: int) -> list[str]:
    """Addresses from which this machine would reach the internet, IPv4 first; sends nothing.

    Connecting a UDP socket only asks the routing table for the source address.
    """
    found: list[str] = []
    for family, far in _FAR:
        if families and family not in families:
            continue
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                host = probe.getsockname()[0]
        except OSError:  # no route, or no such family on this machine
            continue
        ip = _ip(host)
        if ip is not None and not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
            found.append(str(ip))
    return found


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bad(text: str, reason: str) -> UsageError:
    return UsageError(f"{text!r} is not an address: {reason}.", remedy="Write HOST:PORT, as in 203.0.113.7:4001.")
