"""Building the library, its agreement with the ctypes declarations, and the whole of it under load."""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from compiling import COMPILER, SOURCES, build_native, compile_program, needs_compiler
from fake_gpu import SOURCES as DRIVER_SOURCES
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Step


def test_without_a_compiler_the_error_names_the_cause_and_the_cure(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build_native.BuildError) as caught:
        build_native.compile_native(tmp_path / "lib.so")
    for part in ("no C++ compiler was found", "$CXX, c++, g++, clang++", "HOSTCALLBACK_BUILD_NATIVE=0"):
        assert part in str(caught.value)
    assert build_native.main(["--output", str(tmp_path / "lib.so")]) == 1
    assert "HOSTCALLBACK_BUILD_NATIVE=0" in capsys.readouterr().err


def test_a_compiler_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(build_native.BuildError, match="'no-such-compiler'"):
        build_native.compile_native(tmp_path / "lib.so")


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(build_native.BuildError, match="compiling the native transport failed"):
        build_native.compile_native(tmp_path / "lib.so", f"{sys.executable} -S -E -c raise(SystemExit(1))")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_compiler
def test_the_sources_compile_without_warnings(tmp_path):
    library = build_native.compile_native(tmp_path / "deep" / "lib.so", extra_flags=["-Werror", "-O0"])
    assert native.load_from(library).hcb_abi_version() == native.ABI_VERSION


@needs_compiler
def test_the_ctypes_declarations_agree_with_the_header(tmp_path):
    structures = {
        "hcb_config": native.Config,
        "hcb_counters": native.Counters,
        "hcb_block": native.Block,
        "hcb_batch": native.Batch,
        "hcb_stamp": native.Stamp,
        "hcb_event": native.Event,
    }
    constants = {
        "HCB_ABI_VERSION": native.ABI_VERSION,
        "HCB_BATCH_FRAMES": native.BATCH_FRAMES,
        "HCB_BATCH_BLOCKS": native.BATCH_BLOCKS,
        "HCB_EMITTED": native.EMITTED,
        "HCB_DROPPED": native.DROPPED,
        "HCB_QUEUED": native.QUEUED,
        "HCB_INVALID": native.INVALID,
        "HCB_TOO_LARGE": native.TOO_LARGE,
        "HCB_EVENT_STALL": native.EVENT_STALL,
        "HCB_EVENT_NEW_RING": native.EVENT_NEW_RING,
        "HCB_EVENT_NOT_PINNED": native.EVENT_NOT_PINNED,
        "HCB_COPY_FAILED": native.COPY_FAILED,
        "HCB_SAMPLE_BEYOND_HALF": Step.SAMPLE_BEYOND_HALF.value,
        "HCB_OVERWRITE_OLDEST": Step.OVERWRITE_OLDEST.value,
        "HCB_LEAVE_OUT": Step.LEAVE_OUT.value,
        "HCB_CUDA": native.GPU_VENDORS["cuda"],
        "HCB_ROCM": native.GPU_VENDORS["rocm"],
    }
    wanted = dict(constants)
    for name, structure in structures.items():
        wanted[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            wanted[f"offsetof({name}, {field})"] = getattr(structure, field).offset
    lines = [f"static_assert({name} == {value});" for name, value in wanted.items()]
    source = tmp_path / "layout.cc"
    source.write_text(
        "#include <cstddef>\n#include <abi/exports.h>\n" + "\n".join(lines) + "\nint main() {}\n"
    )
    compile_program([source], tmp_path / "layout")


@needs_compiler
def test_the_header_is_plain_c(tmp_path):
    source = tmp_path / "plain.c"
    source.write_text("#include <abi/exports.h>\nint main(void) { return 0; }\n")
    flags = [
        "-x",
        "c",
        "-std=c99",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        f"-I{SOURCES}",
    ]
    done = subprocess.run([*COMPILER, *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def library_object(tmp_path_factory, worker_id):
    """Compiles the library's sources with flags. All processes that run tests share the object."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent

    def compiled(flags):
        folder = shared / "-".join(["objects", *flags]).replace("=", "").replace(",", "")
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                compile_program([build_native.as_one_source(folder)], folder / "library.o", "-c", *flags)
                (folder / "done").touch()
        return folder / "library.o"

    return compiled


def run_under_load(library_object, program, tmp_path, sanitizer, library_sources=(), count=2000):
    """Links a stress program with the library's object, and runs it with a library of other sources."""
    flags = ["-O1", "-pthread", *([f"-fsanitize={sanitizer}"] if sanitizer else [])]
    empty = tmp_path / "empty.cc"
    empty.write_text("int main() {}\n")
    try:
        compile_program([empty], tmp_path / "empty", *flags)
        subprocess.run([tmp_path / "empty"], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip(f"the sanitizer {sanitizer!r} does not work here")
    stress = tmp_path / "stress"
    compile_program([library_object(flags), Path(__file__).parent / program], stress, *flags)
    arguments = [stress, str(count), tmp_path / "file"]
    if library_sources:
        arguments[-1] = tmp_path / "library.so"
        compile_program(library_sources, arguments[-1], "-fPIC", "-shared", "-fvisibility=hidden", *flags)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "runtime error" not in done.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["", "thread", "address,undefined"])
@pytest.mark.parametrize(
    "program",
    ["ring/ring_stress.cc", "ring/turn_stress.cc", "handlers/call_stress.cc", "rules/rule_stress.cc"],
)
def test_rings_turns_calls_and_rules_hold_under_load(library_object, tmp_path, program, sanitizer):
    run_under_load(library_object, program, tmp_path, sanitizer, count=1000)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["", "thread", "address,undefined"])
def test_gpu_rings_hold_under_load(library_object, tmp_path, sanitizer):
    run_under_load(library_object, "gpu/gpu_stress.cc", tmp_path, sanitizer, DRIVER_SOURCES)


def test_a_missing_library_is_named_with_the_cure(tmp_path):
    with pytest.raises(native.NativeLibraryError) as caught:
        native.load_from(tmp_path / "lib.so")
    for part in (str(tmp_path / "lib.so"), "C++17 compiler", "HOSTCALLBACK_TRANSPORT=callback"):
        assert part in str(caught.value)


def test_a_file_that_is_not_a_library_is_named_with_the_cure(tmp_path):
    file = tmp_path / "lib.so"
    file.write_text("text")
    with pytest.raises(native.NativeLibraryError, match="cannot be used") as caught:
        native.load_from(file)
    assert isinstance(caught.value.__cause__, OSError)


@needs_compiler
@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(99, f"interface version 99, expected {native.ABI_VERSION}", id="another version"),
        pytest.param(native.ABI_VERSION, r"built from other sources.*build_native\.py", id="lacks functions"),
    ],
)
def test_a_library_of_other_sources_is_refused(tmp_path, version, message):
    source = tmp_path / "old.cc"
    source.write_text(f'extern "C" unsigned hcb_abi_version() {{ return {version}; }}\n')
    library = tmp_path / "old.so"
    compile_program([source], library, "-shared", "-fPIC")
    with pytest.raises(native.NativeLibraryError, match=message):
        native.load_from(library)
