"""Messages come from descriptors that are in step with the .proto files."""

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from swarm.net.messages import descriptors, message_class

PROTO = Path(__file__).parents[2] / "proto"


def test_the_descriptors_are_those_of_the_proto_files(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    compiled = tmp_path / "swarm_v1.binpb"
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("swarm/v1/*.proto"))
    arguments = ["protoc", f"-I{PROTO}", "--include_imports", f"--descriptor_set_out={compiled}", *sources]
    assert protoc.main(arguments) == 0
    fresh = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    by_name = {file.name: file for file in fresh.file}
    assert {file.name: file for file in descriptors().file} == by_name, "run `make proto`"


def test_a_message_survives_the_wire():
    kind = message_class("EnrolRequest")
    request = kind(csr=b"csr", run_id="ab" * 16, protocol=3, wall_s=1.5)
    assert kind.FromString(request.SerializeToString()) == request
    assert message_class("EnrolRequest") is kind


def test_a_message_that_does_not_exist_is_a_key_error():
    with pytest.raises(KeyError):
        message_class("NoSuchMessage")
