"""The committed Python messages are those that protoc makes of proto/ftis.proto."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from ftis_node.swarm import ftis_pb2

PROTO = Path(__file__).parent.parent / "proto" / "ftis.proto"


def test_the_committed_messages_are_what_protoc_makes_of_the_file(tmp_path):
    pytest.importorskip("grpc_tools")
    out = tmp_path / "set.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={out}"]
    subprocess.run([*command, str(PROTO)], check=True)
    [made] = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    for message in made.message_type:
        for field in message.field:
            field.ClearField("json_name")  # protoc adds it to descriptor sets only
    assert descriptor_pb2.FileDescriptorProto.FromString(ftis_pb2.DESCRIPTOR.serialized_pb) == made
