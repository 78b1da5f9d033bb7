"""Control messages survive the wire, whatever their fields hold; a message without a protobuf twin fails here."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from swarm.core import messages
from swarm.errors import RefusedError
from swarm.net.control import (
    decode_coordinator_message,
    decode_peer_message,
    encode_coordinator_message,
    encode_peer_message,
)
from swarm.net.messages import message_class

PEER = typing.get_args(messages.PeerMessage)
COORDINATOR = typing.get_args(messages.CoordinatorMessage)


def filled(kind: type, salt: int = 1) -> Any:
    """An instance of a dataclass with a value of its own in every field."""
    values = {}
    for number, (name, hint) in enumerate(typing.get_type_hints(kind).items(), start=salt):
        values[name] = _value(hint, number)
    return kind(**values)


def _value(hint: Any, number: int) -> Any:
    if dataclasses.is_dataclass(hint):
        return filled(typing.cast(type, hint), number)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return (_value(item, number), _value(item, number + 1))
    return {int: 1000 + number, float: number + 0.25, str: f"text {number}", bool: True}[hint]


@pytest.mark.parametrize("kind", PEER)
def test_a_message_of_a_peer_arrives_as_it_was_sent(kind: type) -> None:
    message = filled(kind)
    assert decode_peer_message(encode_peer_message(message)) == message


@pytest.mark.parametrize("kind", COORDINATOR)
def test_a_message_of_the_coordinator_arrives_as_it_was_sent(kind: type) -> None:
    message = filled(kind)
    assert decode_coordinator_message(encode_coordinator_message(message)) == message


@pytest.mark.parametrize("kind", [messages.Waiting, messages.Begin])
def test_empty_lists_stay_empty(kind: type) -> None:
    values = {name: () if typing.get_origin(hint) is tuple else 0 for name, hint in typing.get_type_hints(kind).items()}
    message = kind(**(values | ({"reason": ""} if kind is messages.Waiting else {})))
    assert decode_coordinator_message(encode_coordinator_message(message)) == message


@pytest.mark.parametrize("kind", [*PEER, *COORDINATOR])
def test_both_sides_have_the_same_fields(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == {field.name for field in message_class(kind.__name__).DESCRIPTOR.fields}


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"\x0a\x05ab"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="control message"):
        decode_peer_message(data)
    with pytest.raises(RefusedError, match="control message"):
        decode_coordinator_message(data)
