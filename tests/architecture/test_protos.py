"""The wire's conventions, checked on the .proto files and the generated code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import EnumDescriptor, FileDescriptor

from common import types
from protos.inference.v1 import admin_pb2, fleet_pb2, inference_pb2, jobs_pb2, types_pb2, worker_pb2
from tests.architecture.source_tree import ROOT

PROTO_DIR = ROOT / "protos" / "inference" / "v1"
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (types_pb2, inference_pb2, jobs_pb2, worker_pb2, fleet_pb2, admin_pb2)
]
ENUMS: list[EnumDescriptor] = [enum for file in FILES for enum in file.enum_types_by_name.values()]

FIELD = re.compile(r"^\s*(?:optional |repeated )?[\w.]+(?:<[^>]*>)? (\w+) = \d+;")
DURATION = re.compile(r"(^|_)(ttl|queue|age|ttft|total|timeout|delay|wait)$")


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def test_every_proto_file_is_checked() -> None:
    assert {path.name for path in PROTO_DIR.glob("*.proto")} == {file.name.split("/")[-1] for file in FILES}


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.name)
def test_every_enum_starts_with_unspecified(enum: EnumDescriptor) -> None:
    prefix = snake(enum.name)
    assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
    assert enum.values[0].number == 0
    assert all(value.name.startswith(prefix + "_") for value in enum.values)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.name)
def test_domain_enums_equal_the_wire(enum: EnumDescriptor) -> None:
    domain = getattr(types, enum.name)
    wire = {value.name.removeprefix(snake(enum.name) + "_"): value.number for value in enum.values if value.number}
    assert {member.name: member.value for member in domain} == wire


@pytest.mark.parametrize("path", sorted(PROTO_DIR.glob("*.proto")), ids=lambda path: path.name)
def test_every_field_has_a_comment(path: Path) -> None:
    bare = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        is_commented = "//" in line or lines[number - 1].strip().startswith("//")
        if FIELD.match(line) and not is_commented:
            bare.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert bare == []


@pytest.mark.parametrize("path", sorted(PROTO_DIR.glob("*.proto")), ids=lambda path: path.name)
def test_durations_carry_their_unit(path: Path) -> None:
    names = [field.group(1) for line in path.read_text().splitlines() if (field := FIELD.match(line))]
    assert [name for name in names if DURATION.search(name)] == []
