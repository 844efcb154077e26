"""Capsules that are cut off, changed, foreign or crafted are refused in one line, and none of their texts is run."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from checkout import python_path
from hostcallback.api.capsule.reproduce import script_of
from hostcallback.receiver import Capsule, CapsuleError
from hostcallback.receiver.capsule.file_format import CapsuleWriter, Failure, Input, Shard
from hostcallback.receiver.cli import main
from hostile_log import HOSTILE, UNSAFE
from mutations import examples, mutated_bytes, mutated_value
from python_process import run_python

MEMORY_BYTES = 2 << 30
LISTED = 46
"""Bytes of an entry of a zip archive's list of members, without the name."""


def written(path: Path, program: bytes = b"none", **about: Any) -> Path:
    """A capsule with two inputs, one of them in two shards."""
    writer = CapsuleWriter(path, 1 << 30)
    shards = tuple(Shard("", k, (k * 2, 0), (2, 3)) for k in range(2))
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    writer.add("program.jaxexport", program)
    writer.add_inputs(
        [
            (Input("args[0]", "float32", (4, 3), shards, (("data", 2),), (("data",), ())), [whole[:2], whole[2:]]),
            (Input("args[1]", "int32", (), (Shard("", 0, (), ()),)), [np.array(7, np.int32)]),
        ]
    )  # fmt: skip
    writer.add("report.txt", b"x is 7\n  at a.py:1")
    about = {"name": "train", "devices": [{"id": 0}], **about}
    writer.finish(about, Failure("check", "x", "a.py:1 (f)", "x is 7", "cpu:0"))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A capsule as the writer makes it."""
    return written(tmp_path / "good.hcb")


def with_manifest(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes the manifest of a capsule; all checksums are correct."""
    with zipfile.ZipFile(path) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    manifest = json.loads(members["manifest.json"])
    changed = change(manifest)
    text = changed if isinstance(changed, bytes) else json.dumps(changed or manifest).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {**members, "manifest.json": text}.items():
            file.writestr(name, data)


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of the class and of the command, which is one line."""
    with pytest.raises(CapsuleError) as error:
        Capsule(path)
    assert main(["reproduce", "--show", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert not UNSAFE & set(err[:-1])
    assert len(err) < 1000
    return str(error.value)


def use(path: Path) -> None:
    """Reads all of a capsule; CapsuleError is the only exception."""
    capsule = Capsule(path)
    for name in ("program.jaxexport", "report.txt"):
        assert capsule.member(name)
    assert capsule.messages == []
    for entry in capsule.inputs:
        for shard in entry.shards:
            if shard.member:
                assert capsule.array(entry, shard).shape == shard.shape


def test_the_capsule_without_a_change_is_read(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use(good)
    with_manifest(good, lambda manifest: None)
    use(good)
    assert main(["reproduce", "--show", str(good)]) == 0
    assert "args[0]: float32[4, 3] in 2 shards" in capsys.readouterr().out


def test_a_capsule_that_is_cut_off_at_any_member(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = good.read_bytes()
    with zipfile.ZipFile(good) as file:
        starts = [info.header_offset for info in file.infolist()] + [file.start_dir]
    for at in {
        0,
        1,
        *(near for start in starts for near in (start, start + 30)),
        len(data) - 22,
        len(data) - 1,
    }:
        good.write_bytes(data[:at])
        assert "not a capsule, or cut off" in refused(good, capsys)


def test_foreign_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.hcb"
    for data in (b"", b"\0" * 4096, b"PK\x05\x06" + b"\0" * 18, b"HCBLOG" * 99, b"PK\x05\x06" + b"\xff" * 18):
        path.write_bytes(data)
        refused(path, capsys)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/document.xml", "x" * 1000)
    assert "is compressed" in refused(path, capsys)
    path.unlink()
    os.mkfifo(path)
    assert "not a file" in refused(path, capsys)
    path.unlink()
    path.mkdir()
    assert "not a file" in refused(path, capsys)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    """A change of one part of a manifest."""

    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


DEVICE = ("inputs", 0, "shards", 0, "device")

MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of a newer format": (put("format", value=2), "reads formats up to 1: upgrade"),
    "of no format": (put("format", value=True), "has no format number"),
    "of format 0": (put("format", value=0), "damaged: format 0"),
    "no JSON": (lambda m: b"{", "no JSON"),
    "no object": (lambda m: b"[1]", "no format number"),
    "deep": (lambda m: b"[" * 200_000, "no JSON"),
    "deep texts left out": (put("left_out", value=[nested(600)]), "expected a text"),
    "deep shape": (put("inputs", 0, "shape", value=[nested(600)]), "expected a whole number"),
    "deep mesh": (put("inputs", 0, "mesh", value=[[nested(600), 1]]), "expected a text"),
    "infinite device": (put(*DEVICE, value=float("inf")), "inf, expected a whole number"),
    "device that is no number": (put(*DEVICE, value=float("nan")), "nan, expected a whole number"),
    "fraction": (put("inputs", 0, "shape", value=[4.0, 3]), "4.0, expected a whole number"),
    "long number": (put(*DEVICE, value=10**400), "expected a whole number"),
    "negative": (put("inputs", 0, "shards", 0, "start", value=[-2, 0]), "-2, expected a whole number"),
    "shard outside": (put("inputs", 0, "shards", 1, "start", value=[3, 0]), "outside of its array"),
    "shard far outside": (put("inputs", 0, "shards", 1, "start", value=[2**61, 0]), "outside of its array"),
    "shard of other rank": (put("inputs", 0, "shards", 1, "start", value=[2]), "damaged"),
    "shards over each other": (
        lambda m: m["inputs"][0]["shards"].append(m["inputs"][0]["shards"][0]), "shards of an input overlap"),
    "huge shape": (put("inputs", 1, "shards", 0, "shape", value=[2**61]), "damaged"),
    "huge shape of few bytes": (
        lambda m: m["inputs"][1].update(
            shape=[2**61] * 64, shards=[{**m["inputs"][1]["shards"][0], "start": [0] * 64, "shape": [2**61] * 64}]
        ), "does not have its array's size"),
    "many dimensions": (put("inputs", 0, "shape", value=[1] * 65), "the shape"),
    "dtype that does not exist": (put("inputs", 0, "dtype", value="float99"), "the dtype 'float99'"),
    "object": (put("inputs", 0, "dtype", value="object"), "the dtype 'object'"),
    "code as a dtype": (put("inputs", 0, "dtype", value="__import__('os').abort()"), "the dtype"),
    "other member": (put("inputs", 0, "shards", 0, "member", value="../../etc/passwd"), "array's size"),
    "escapes": (put("inputs", 0, "shards", 0, "member", value=HOSTILE), "array's size"),
    "escapes in a dtype": (put("inputs", 0, "dtype", value=HOSTILE * 999), "the dtype"),
    "no inputs": (lambda m: m.pop("inputs") and None, "it has no 'inputs'"),
    "inputs that are a text": (put("inputs", value="xx"), "the list of inputs"),
    "failure that is a list": (put("failure", value=[1]), "damaged"),
    "spec that is a text": (put("inputs", 0, "spec", value=["ab"]), "expected a list of texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest(name: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, text = MANIFESTS[name]
    with_manifest(good, change)
    assert text in refused(good, capsys)


def test_changed_manifests(good: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(good) as file:
        manifest = json.loads(file.read("manifest.json"))
    choose, path = random.Random(1), tmp_path / "changed.hcb"
    good.rename(path)
    for _ in range(examples(2)):
        value = json.loads(json.dumps(mutated_value(manifest, choose), default=str))
        with_manifest(path, lambda _, value=value: json.dumps(value).encode())
        try:
            use(path)
        except CapsuleError:
            continue
        assert main(["reproduce", "--show", str(path)]) in (0, 2)
        script_of(Capsule(path))
    with_manifest(path, lambda _: manifest)
    use(path)


def test_changed_bytes(good: Path) -> None:
    data, choose = good.read_bytes(), random.Random(2)
    for _ in range(examples(1)):
        good.write_bytes(mutated_bytes(data, choose))
        with contextlib.suppress(CapsuleError):
            use(good)
    good.write_bytes(data)
    use(good)


def entries(data: bytes) -> tuple[int, int]:
    """Where the list of members begins in a file, and its number of bytes."""
    size, start = struct.unpack_from("<LL", data, len(data) - 10)
    return start, size


def changed_entry(path: Path, member: int, at: int, value: bytes) -> None:
    """Changes some bytes of an entry of the list of members."""
    data = bytearray(path.read_bytes())
    start, _ = entries(data)
    for _ in range(member):
        name, extra, comment = struct.unpack_from("<3H", data, start + 28)
        start += LISTED + name + extra + comment
    assert data[start : start + 4] == b"PK\x01\x02"
    data[start + at : start + at + len(value)] = value
    path.write_bytes(data)


def test_lists_of_members_that_lie(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = good.read_bytes()
    long = struct.pack("<L", 2**32 - 1)
    changes = {
        "flags": (1, 8, b"\x01"), "method": (1, 10, b"\x08"), "stored bytes": (1, 20, long),
        "bytes": (1, 24, long), "both": (1, 20, long * 2), "offset": (1, 42, long),
        "same offset": (1, 42, struct.pack("<L", 0)), "version": (1, 6, b"\xff\x00"), "name": (1, 28, b"\xff\xff"),
        "extra": (1, 30, b"\xff\xff"), "patched": (1, 8, b"\x20"),
    }  # fmt: skip
    for member, at, value in changes.values():
        good.write_bytes(data)
        changed_entry(good, member, at, value)
        text = refused(good, capsys)
        assert "not a capsule, or cut off" in text or "has no manifest.json" in text
    for at, value in ((-10, 0), (-10, 7), (-10, 2**32 - 1), (-6, 2**31)):  # size and place of the list
        good.write_bytes(data[:at] + struct.pack("<L", value) + data[at + 4 :])
        with pytest.raises(CapsuleError):
            use(good)


def test_members_of_one_name_and_damaged_members(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(good, "a") as file:
        file.writestr("manifest.json", b"{}")
    assert "two of its members have the same name" in refused(good, capsys)
    written(good)
    data = good.read_bytes()
    for place in (b"none", np.float32(2).tobytes() + np.float32(3).tobytes(), b'"format"'):
        assert data.count(place) == 1
        good.write_bytes(data.replace(place, bytes(len(place))))
        with pytest.raises(CapsuleError, match="its checksum is wrong"):
            use(good)


SPARSE = 8 << 30

UNDER_A_LIMIT = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
from hostcallback.receiver import Capsule
from hostcallback.receiver.cli import main
large, listed, numbers = sys.argv[1:]
print("status", main(["reproduce", "--show", large]))
capsule = Capsule(large)
try:
    capsule.array(capsule.inputs[0])
except OSError as error:
    print("array", error)
print("status", main(["reproduce", "--show", listed]))
print("status", main(["reproduce", "--show", numbers]))
"""


def sparse_input(path: Path) -> None:
    """A capsule with an input of 8 GiB, which takes no place on the disk."""
    manifest = {
        "format": 1, "name": "f", "left_out": [],
        "failure": dict.fromkeys(("kind", "name", "source_line", "text", "device"), ""),
        "inputs": [{
            "path": "args[0]", "dtype": "uint8", "shape": [SPARSE], "mesh": [], "spec": [], "left_out": "",
            "shards": [{"member": "x", "device": 0, "start": [0], "shape": [SPARSE]}],
        }],
    }  # fmt: skip
    with path.open("wb") as raw, zipfile.ZipFile(raw, "w") as file:
        file.writestr("manifest.json", json.dumps(manifest))
        start = raw.tell()
        info = zipfile.ZipInfo("x")
        info.CRC = 0
        info.header_offset, info.file_size, info.compress_size = start, SPARSE, SPARSE
        raw.write(info.FileHeader(zip64=True))
        raw.seek(SPARSE, io.SEEK_CUR)
        file.filelist.append(info)
        file.NameToInfo["x"] = info
        file.start_dir = raw.tell()
        file._didModify = True


def sparse_list(path: Path) -> None:
    """An archive whose list of members has 8 GiB."""
    with path.open("wb") as raw:
        raw.seek(SPARSE)
        raw.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, SPARSE, 0))
        raw.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, SPARSE, 1))
        raw.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))


def test_a_capsule_larger_than_memory(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.hcb" for name in ("large", "listed", "numbers")]
    sparse_input(paths[0])
    sparse_list(paths[1])
    written(paths[2])
    with_manifest(paths[2], lambda manifest: b'{"format": 1, "name": [' + b"[]," * (22 << 20) + b"[]]}")
    done = run_python("-c", UNDER_A_LIMIT, *paths, PYTHONPATH=python_path(), OPENBLAS_NUM_THREADS="1")
    statuses = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert statuses == ["status 0", "status 2", "status 2"], done.stderr[-2000:]
    assert f"args[0]: uint8[{SPARSE}]" in done.stdout
    assert "array [Errno 12]" in done.stdout
    assert "its list of members has 8,589,934,592 bytes, expected at most" in done.stderr
    assert done.stderr.count("\n") == 2


def exported(*shapes: tuple[int, ...]) -> bytes:
    """A program of arrays of these shapes."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return bytes(jax.export.export(jax.jit(lambda *xs: sum(x.sum() for x in xs)))(*arrays).serialize())


def damaged_program() -> bytes:
    """A program whose description can be read, and whose code cannot."""
    data = bytearray(exported((4, 3), ()))
    at = data.index(b"ML\xefR")
    data[at + 12 : at + 400] = b"\xee" * 388
    return bytes(data)


PROGRAMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "garbage": (lambda: b"\x93NUMPY" * 99, "cannot read the program"),
    "empty": (lambda: b"", "cannot read the program"),
    "damaged": (damaged_program, "does not run here"),
    "of other inputs": (lambda: exported((4, 3)), "the program takes 1 arrays, and the capsule has 2"),
    "of other shapes": (lambda: exported((3, 4), ()), "does not run here"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, text = PROGRAMS[name]
    path = written(tmp_path / "a.hcb", make(), versions="x")
    assert main(["reproduce", str(path)]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    "change",
    [
        put("inputs", 0, "mesh", value=[["data", 2**61]]),
        put("inputs", 0, "mesh", value=[["data", 0]]),
        put("inputs", 0, "mesh", value=[["", 2]]),
        put("inputs", 0, "mesh", value=[["data", 1], ["data", 2]]),
        put("inputs", 0, "spec", value=[["x"], ["data", "data"]]),
        put("inputs", 0, "spec", value=[[]] * 60),
        put("inputs", 0, "shape", value=[2**40, 3]),
        put("inputs", 0, "shards", value=[]),
        put("inputs", 1, "left_out", value="gone"),
        put("process", value={"count": nested(600), "index": "\x1b[2J"}),
    ],
    ids=range(10),
)
def test_inputs_that_cannot_be_made(
    change: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.hcb", exported((4, 3), ()))
    with_manifest(path, change)
    assert main(["reproduce", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert not UNSAFE & set(err[:-1])


CODE = [
    '"""\nopen("run", "w")\n"""', "'\nopen('run', 'w')\n#", "\\", '\\"""', "{path}{0.__class__}{{",
    "\r\nimport os\f\v\x85\u2028x",
    "x" * 999 + "\x1b\N{SNOWMAN}", "\\N{SNOWMAN}\\x", "\0\x1a", "# -*- coding: utf-7 -*-\n+AG8-", "\udc80",
]  # fmt: skip


@pytest.mark.parametrize("text", CODE, ids=range(len(CODE)))
def test_a_script_runs_no_text_of_the_capsule(text: str, tmp_path: Path) -> None:
    names = written(tmp_path / "good.hcb"), tmp_path / "script.py"
    expected = ast.dump(ast.parse(script_of(Capsule(names[0]))))

    def change(manifest: Any) -> None:
        manifest["failure"].update(dict.fromkeys(manifest["failure"], text))
        manifest.update(
            name=text, left_out=[text], versions={text: text}, platform=text, environment={text: text}
        )
        for entry in manifest["inputs"]:
            entry.update(path=text, spec=[[text]], mesh=[[text, 1]])

    with_manifest(names[0], change)
    assert main(["reproduce", "--python", str(names[1]), str(names[0])]) == 0
    tree = ast.parse(names[1].read_bytes())
    assert isinstance(tree.body[0], ast.Expr), "the module's docstring"
    original = ast.parse(script_of(Capsule(written(tmp_path / "good.hcb"))))
    assert ast.dump(original) == expected
    original.body[0] = tree.body[0]
    assert ast.dump(tree) == ast.dump(original), "texts are in the docstring and in comments only"


@pytest.mark.parametrize("byte", [0, 1, 2, 255])
def test_a_bool_is_0_or_1(tmp_path: Path, byte: int) -> None:
    writer, path = CapsuleWriter(tmp_path / "bool.hcb", 1 << 30), tmp_path / "bool.hcb"
    crafted = np.array([1, byte, 0], np.uint8)
    writer.add_inputs([(Input("args[0]", "bool", (3,), (Shard("", 0, (0,), (3,)),)), [crafted])])
    writer.finish({"name": "train"}, Failure("check", "x", "a.py:1 (f)", "x is 7", "cpu:0"))
    capsule = Capsule(path)
    if byte > 1:
        with pytest.raises(
            CapsuleError, match=rf"args\[0\] is damaged: a bool has the byte {byte}, expected 0 or 1"
        ):
            capsule.array(capsule.inputs[0])
    else:
        np.testing.assert_array_equal(capsule.array(capsule.inputs[0]), crafted.astype(bool))
