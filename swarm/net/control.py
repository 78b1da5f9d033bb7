"""Control messages as bytes: the dataclasses of :mod:`swarm.core.messages` in the protobuf of ``control.proto``.

Field names are the same on both sides, so one mapping serves all messages; a test walks every class.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from functools import cache
from typing import Any

from google.protobuf.message import DecodeError

from swarm.core import messages
from swarm.errors import RefusedError
from swarm.net.messages import message_class

T = typing.TypeVar("T")


def encode_peer_message(message: messages.PeerMessage) -> bytes:
    """A message from a peer to the coordinator."""
    return _encode("FromPeer", message)


def decode_peer_message(data: bytes) -> messages.PeerMessage:
    """The inverse of :func:`encode_peer_message`.

    Raises:
        RefusedError: not such a message.
    """
    return _decode("FromPeer", messages.PeerMessage, data)


def encode_coordinator_message(message: messages.CoordinatorMessage) -> bytes:
    """A message from the coordinator to a peer."""
    return _encode("FromCoordinator", message)


def decode_coordinator_message(data: bytes) -> messages.CoordinatorMessage:
    """The inverse of :func:`encode_coordinator_message`.

    Raises:
        RefusedError: not such a message.
    """
    return _decode("FromCoordinator", messages.CoordinatorMessage, data)


def fill(target: Any, source: Any) -> None:
    """Copy the fields of a dataclass into a protobuf message with the same field names."""
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        if dataclasses.is_dataclass(value):
            fill(getattr(target, field.name), value)
        elif isinstance(value, tuple):
            repeated = getattr(target, field.name)
            for item in value:
                if dataclasses.is_dataclass(item):
                    fill(repeated.add(), item)
                else:
                    repeated.append(item)
        else:
            setattr(target, field.name, value)
    # A nested message without any set field must still be present.
    target.SetInParent()


def extract(kind: type[T], source: Any) -> T:
    """The inverse of :func:`fill`."""
    values: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        value = getattr(source, name)
        if dataclasses.is_dataclass(hint):
            values[name] = extract(typing.cast(type, hint), value)
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            values[name] = tuple(
                extract(typing.cast(type, item), part) if dataclasses.is_dataclass(item) else part for part in value
            )
        else:
            values[name] = value
    return kind(**values)


def _encode(envelope: str, message: object) -> bytes:
    proto = message_class(envelope)()
    fill(getattr(proto, _snake(type(message).__name__)), message)
    return proto.SerializeToString()


def _decode(envelope: str, union: types.UnionType, data: bytes) -> Any:
    proto = message_class(envelope)()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise _refusal(envelope) from None
    name = proto.WhichOneof("message")
    for kind in typing.get_args(union):
        if _snake(kind.__name__) == name:
            return extract(kind, getattr(proto, name))
    raise _refusal(envelope)


def _refusal(envelope: str) -> RefusedError:
    return RefusedError(
        f"Refused a control message: it is not a {envelope}.",
        meaning="The session is closed.",
        remedy="The other side runs another version of swarm: install the one that the run's owner uses.",
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@cache
def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
