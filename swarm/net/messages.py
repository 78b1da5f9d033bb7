"""The protobuf messages of ``proto/swarm/v1``, for every protobuf release from 5.29 on.

Generated Python code only works with the protobuf release it was generated for, and newer. So none is generated: the
compiled descriptors come with the package (``swarm_v1.binpb``, made by ``make proto``) and classes are made from them.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "swarm.v1"
DESCRIPTORS = "swarm_v1.binpb"


@cache
def message_class(name: str) -> Any:
    """The class of message ``name`` of package ``swarm.v1``, as in ``message_class("EnrolRequest")``.

    Raises:
        KeyError: there is no such message.
    """
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The compiled descriptors of all ``.proto`` files."""
    data = (resources.files("swarm.net") / DESCRIPTORS).read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    # A pool of its own: another library's messages of the same name do not clash.
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors().file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool
