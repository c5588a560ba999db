"""What the wheel installs: libraries, headers, device code, types and the tool."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ferrogin
import pytest
from conftest import EXAMPLES, HANG_LIMIT, Run
from ferrogin import _library, paths

ROOT = EXAMPLES.parent.parent


def output(*command: str) -> str:
    # FERROGIN_DIST would point at the build's libraries.
    env = {name: value for name, value in os.environ.items() if name != "FERROGIN_DIST"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=2 * HANG_LIMIT, env=env).stdout


def test_version_is_that_of_the_library_and_of_cargo() -> None:
    (version,) = re.findall(r'(?m)^version = "(.*)"', (ROOT / "Cargo.toml").read_text())
    assert importlib.metadata.version("ferrogin") == ferrogin.version() == ferrogin.__version__ == version


def test_package_is_installed_and_not_the_sources() -> None:
    assert sysconfig.get_path("purelib") in ferrogin.__file__ or sysconfig.get_path("platlib") in ferrogin.__file__


def test_file_list_has_no_path_of_the_machine() -> None:
    files = [str(file) for file in importlib.metadata.files("ferrogin") or []]
    assert len(files) > 25
    for file in files:
        assert file.startswith(("ferrogin/", "ferrogin-")) or file == "../../../bin/ferrogin", file


def test_module_prints_its_paths() -> None:
    module = (sys.executable, "-m", "ferrogin")
    for name in ("include", "lib", "plugin", "ptx", "bitcode", "tool"):
        assert Path(output(*module, name).strip()).exists()
    assert output(*module, "include", "lib").split() == [str(paths.include()), str(paths.lib())]
    assert "bitcode" in output(*module)
    result = subprocess.run([*module, "headers"], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2 and "usage: python -m ferrogin [include|lib|" in result.stderr
    with pytest.raises(FileNotFoundError, match="make ptx wheel"):
        paths.cuda_object("sm_1")


def test_tool_finds_the_libraries_of_the_package() -> None:
    tool = str(Path(sys.executable).parent / "ferrogin")
    assert ferrogin.version() in output(tool, "--version")
    assert str(paths.lib()) in "".join(output(tool, "doctor", "--all", "--only", "plugin").split())


def test_wheel_has_the_software_gpu_and_the_verbs_of_the_tool() -> None:
    tool = str(Path(sys.executable).parent / "ferrogin")
    for part in ("gpu", "verbs"):
        directory = paths.lib() / "ferrogin" / part
        assert output(tool, part, "--", "sh", "-c", "echo $LD_LIBRARY_PATH").strip().split(":")[0] == str(directory)


def test_objects_describe_themselves(comm: ferrogin.Comm) -> None:
    with comm.allocate(64) as window, comm.context(signals=2, counters=1) as context:
        gin = context.gin()
        assert repr(comm) == "<ferrogin.Comm, rank 0 of 1>"
        assert repr(context) == f"<ferrogin.Context of 2 signals, 1 counters, at {context.handle:#x}>"
        assert repr(gin) == f"<ferrogin.Gin of {context!r}>"
        assert repr(gin.flush_async()) == f"<ferrogin.Request of {context!r}>"
        assert "ferrogin.Window of 64 bytes" in repr(window)
    assert repr(context) == "<ferrogin.Context of 2 signals, 1 counters, closed>"


def test_extra_of_numba_has_what_the_example_imports() -> None:
    requirements = [text for text in importlib.metadata.requires("ferrogin") or [] if "numba" in text.split(";")[1]]
    assert {re.split(r"[\[>; ]", text)[0] for text in requirements} == {"numba-cuda", "cffi"}


def test_libraries_are_stripped() -> None:
    if not shutil.which("readelf"):
        pytest.skip("there is no readelf")
    for file in [*paths.lib().glob("*.so*"), paths.tool()]:
        if file.read_bytes().startswith(b"\x7fELF"):
            assert ".symtab" not in output("readelf", "-SW", str(file)), file


def test_c_program_compiles_and_links_with_the_package(run: Run, tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("there is no cc")
    lib, program = paths.lib(), tmp_path / "exchange"
    source = ROOT / "host-api" / "examples" / "exchange.c"
    output("cc", str(source), f"-I{paths.include()}", f"-L{lib}", "-lferrogin", f"-Wl,-rpath,{lib}", "-o", str(program))
    results = run(f"import os; os.execv({str(program)!r}, ['exchange'])")
    assert "rank 1 of 2 received 100" in results[1].stdout


def declarations(header: str) -> dict[str, int]:
    """A header's functions and how many parameters each has."""
    text = re.sub(r"/\*[\s\S]*?\*/|(?m:^#.*$)", "", (paths.include() / "ferrogin" / header).read_text())
    found = re.findall(r"(?m)^[\w *]*?\b(ferrogin_\w+|fgin_\w+)\(([^)]*)\);", text)
    return {name: 0 if parameters == "void" else parameters.count(",") + 1 for name, parameters in found}


def test_every_function_of_the_headers_is_declared() -> None:
    headers = {**declarations("host.h"), **declarations("gin.h")}
    # ferrogin_context_device takes fgin_open's place, and a CPU thread has no group to split a flush.
    assert (headers.pop("fgin_open"), headers.pop("fgin_flush_part")) == (3, 3)
    # Device code settles within an operation.
    assert headers.pop("fgin_settle") == 1
    # A CPU thread isn't part of a warp.
    assert [headers.pop(f"fgin_warp_{name}") for name in ("put", "put_value", "signal")] == [10, 9, 5]
    assert headers == {name: len(arguments) for name, (_, arguments) in _library._SIGNATURES.items()}


def test_structs_have_the_sizes_of_the_header() -> None:
    import ctypes

    assert [ctypes.sizeof(struct) for struct in (_library.Options, _library.ContextOptions, _library.RequestWords)] == [16, 40, 128]


def test_blocks_of_the_manual_are_parts_of_tested_files() -> None:
    files = [file.read_text() for file in [*EXAMPLES.glob("*.py"), *Path(__file__).parent.rglob("*.py")]]
    manuals = [ROOT / "docs" / "python.md", EXAMPLES.parent / "README.md"]
    blocks = [block for file in manuals for block in re.findall(r"```python\n(.*?)```", file.read_text(), flags=re.DOTALL)]
    assert blocks
    for block in blocks:
        assert any(block in file for file in files), f"no tested file has the block\n{block}"
