"""The fingerprint: stable, sensitive to every part, and computed without importing torch or triton."""

import dataclasses
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from blackwell import fingerprint as fp

INSIDE = Path(fp.__file__).resolve().parents[1]


def make_assembler(path: Path, text: str) -> Path:
    """A program that answers --version with `text`."""
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_normalize_capabilities() -> None:
    assert fp.normalize_capabilities(["12.0", "9.0", "10.0", "12.0"]) == ("9.0", "10.0", "12.0")


@pytest.mark.parametrize("bad", [[], ["sm_120"], ["120"], ["12"], [""]])
def test_wrong_capabilities_are_refused(bad: list[str]) -> None:
    with pytest.raises(fp.FingerprintError):
        fp.normalize_capabilities(bad)


def test_every_part_changes_the_digest() -> None:
    parts = fp.Parts(
        triton="3.7.1",
        torch="2.12.1",
        python="cpython-3.13",
        machine="x86_64",
        assemblers={"ptxas": "a"},
        capabilities=("12.0",),
    )
    changes: dict[str, object] = {
        "triton": "3.7.0",
        "torch": "2.12.0",
        "python": "cpython-3.12",
        "machine": "aarch64",
        "assemblers": {"ptxas": "b"},
        "capabilities": ("10.0",),
    }
    assert set(changes) == {f.name for f in dataclasses.fields(parts)}
    digests = {dataclasses.replace(parts, **{name: value}).digest() for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(digests | {parts.digest()}) == len(changes) + 1


def test_assembler_follows_triton_and_its_silent_fallback(tmp_path: Path) -> None:
    own = make_assembler(tmp_path / "mine", "Cuda compilation tools, release 99.1, V99.1.1")
    bundled = fp.assembler("ptxas-blackwell", {})
    assert bundled.name == "ptxas-blackwell"
    assert fp.assembler("ptxas-blackwell", {"TRITON_PTXAS_BLACKWELL_PATH": str(own)}) == own
    assert fp.assembler("ptxas-blackwell", {"TRITON_PTXAS_BLACKWELL_PATH": str(tmp_path / "absent")}) == bundled
    silent = make_assembler(tmp_path / "silent", "no version here")
    assert fp.assembler("ptxas-blackwell", {"TRITON_PTXAS_BLACKWELL_PATH": str(silent)}) == bundled
    assert fp.assembler("ptxas-blackwell", {"TRITON_PTXAS_PATH": str(own)}) == bundled, (
        "that variable does nothing on Blackwell"
    )


def test_another_assembler_gives_another_fingerprint(tmp_path: Path) -> None:
    own = make_assembler(tmp_path / "mine", "Cuda compilation tools, release 99.1, V99.1.1")
    here = fp.collect(["12.0"], {}).digest()
    assert fp.collect(["12.0"], {"TRITON_PTXAS_BLACKWELL_PATH": str(own)}).digest() != here
    assert fp.collect(["12.0"], {"TRITON_PTXAS_PATH": str(own)}).digest() == here


def test_text_is_what_triton_puts_into_its_key() -> None:
    triton_compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    assert fp.assembler_texts(["12.0"], {})["ptxas-blackwell"] == triton_compiler.get_ptxas_version(120).strip()


def test_command_prints_it_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from blackwell.fingerprint import main;"
        "code = main(['--capability', '12.0', '--capability', '10.0']);"
        "heavy = {'torch', 'triton', 'fla'} & set(sys.modules); sys.exit(3 if heavy else code)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(INSIDE)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        for _ in range(2)
    ]
    assert re.fullmatch(r"[0-9a-f]{16}\n", runs[0].stdout)
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.strip() == fp.collect(["10.0", "12.0"]).digest()


def test_no_capability_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp.main([]) == 1
    assert "--capability" in capsys.readouterr().err
