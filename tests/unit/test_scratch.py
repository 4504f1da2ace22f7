"""Half-made things: gone when their process is; files whole or not at all; what is damaged in the store is made anew."""

import errno
import gzip
import json
import zipfile
from pathlib import Path

import pytest

from builder import build
from builder.engine import contents, debian, environment, host, places, registry, scratch, sizes, uv
from builder.errors import BusyError, FileError


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    left, other = tmp_path / f"{scratch.PREFIX}killed", tmp_path / "mine"
    for folder in (left, other):
        (folder / "deep").mkdir(parents=True)
    with scratch.directory(tmp_path) as first, scratch.directory(tmp_path) as second:
        assert first.is_dir() and second.is_dir() and first != second
        assert not left.exists() and other.exists()
        with scratch.directory(first) as nested:  # a place that is half-made itself
            assert nested.parent == first
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_nothing_with_a_file_system_mounted_in_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / f"{scratch.PREFIX}killed"
    left.mkdir()
    monkeypatch.setattr(scratch, "_has_mounts", lambda path: path == left)
    with scratch.directory(tmp_path):
        assert left.exists()
    monkeypatch.undo()
    mounted = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    assert not scratch._has_mounts(tmp_path)
    assert all(scratch._has_mounts(path.parent) for path in mounted if path.parent != Path("/"))


def test_files_are_written_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch.write(tmp_path / "a" / "x", "old")
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if data == b"too much":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError) as failed:
        scratch.write_all(tmp_path / "a", {"x": "new", "deep/y": "too much"})
    assert failed.value.filename == str(tmp_path / "a")  # a full disk is named
    assert [(p.name, p.read_text()) for p in (tmp_path / "a").iterdir()] == [("x", "old")]


EMPTY = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "BUILDER_STORE", "NETRC", "DOCKER_CONFIG", "XDG_RUNTIME_DIR")


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_empty_or_relative_variable_never_means_the_current_directory(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in EMPTY:
        monkeypatch.setenv(name, "" if name not in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME") else value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert host.store() == tmp_path / ".cache" / "blackwell-builder"
    monkeypatch.setenv("BUILDER_STORE", "some where")
    assert host.store() == tmp_path / "some where"  # wherever the command changes to
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").touch()
    assert environment.uv_configuration() in (None, Path("/etc/uv/uv.toml")) and environment.netrc() is None
    assert tmp_path / "config.json" not in [p.absolute() for p in registry._authfiles(registry.Access())]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("BUILDER_STORE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(FileError, match="no home directory") as refused:
        host.store()
    assert "BUILDER_STORE" in refused.value.hint
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert host.store() == Path("/somewhere/blackwell-builder")
    with pytest.raises(FileError):
        places.home()


def test_emptying_the_store_removes_what_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUILDER_STORE may name any directory by mistake: the home directory, or the root."""
    monkeypatch.setenv("BUILDER_STORE", str(tmp_path))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("x")
    for name in host.OURS:
        scratch.write(tmp_path / name / "thing", "1234")
    (tmp_path / "logs" / "link").symlink_to(tmp_path / "precious")
    with host.exclusive("some-image"), pytest.raises(BusyError, match="some-image"):
        host.empty_store()
    assert (tmp_path / "wheels" / "thing").exists()
    assert host.empty_store() >= 4 * len(host.OURS)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"] and (tmp_path / "precious" / "thesis").exists()


def test_every_directory_of_the_store_is_known_to_what_empties_it() -> None:
    import re

    root = Path(host.__file__).parents[1]
    text = "".join(p.read_text(encoding="utf-8") for p in root.rglob("*.py") if "inside" not in p.parts)
    named = set(re.findall(r'(?:store|store\(\)) / "([\w-]+)"', text))
    assert len(named) > 5 and named <= set(host.OURS)


DAMAGE = [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 3}', b'{"size": "x", "compressed": 1}', gzip.compress(b"{}"), gzip.compress(b"x")[:9]]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_in_the_store_counts_as_none(damage: bytes, tmp_path: Path) -> None:
    scratch.write(tmp_path / "layers" / "ab.json", damage)
    scratch.write(tmp_path / "kept.json.gz", damage)
    assert sizes._remembered(tmp_path, "sha256:ab") == {}
    assert contents._remembered(tmp_path / "kept.json.gz") is None


def test_a_stored_file_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    archive = tmp_path / "base.tar"
    for data, whole in ((b"x" * 2048 + bytes(1024), True), (b"x" * 2048, False), (b"", False), (bytes(8), False)):
        archive.write_bytes(data)
        assert debian._whole(archive) is whole
    assert not debian._whole(tmp_path)  # a directory

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert not build._whole(wheels) and not build._whole(tmp_path / "none")
    with zipfile.ZipFile(wheels / "a.whl", "w") as wheel:
        wheel.writestr("x", "y" * 100)
    assert build._whole(wheels)
    (wheels / "b.whl").write_bytes((wheels / "a.whl").read_bytes()[:60])
    assert not build._whole(wheels)

    tool = tmp_path / "tool"
    scratch.write(tool / "bin" / "uv", "12345")
    assert not uv._whole(tool)
    scratch.write(tool / "uv-1.dist-info" / "RECORD", "bin/uv,sha256=x,5\nbin/uvx,sha256=x,4\n")
    assert uv._whole(tool)
    scratch.write(tool / "bin" / "uv", "1234")
    assert not uv._whole(tool)


def test_damaged_wheels_in_the_store_are_replaced(tmp_path: Path) -> None:
    scratch.write(tmp_path / "fresh" / "a.whl", "new")
    scratch.write(tmp_path / "store" / "key" / "half.whl", "")
    build._keep(tmp_path / "fresh", tmp_path / "store" / "key")
    assert [p.name for p in (tmp_path / "store").rglob("*")] == ["key", "a.whl"]


def test_what_a_registry_answers_must_be_json() -> None:
    from builder.errors import PublishError

    assert registry.parsed(b'{"a": 1}', "x") == {"a": 1}
    for body in (b"<html>", b"\xff", b"[]", b"", json.dumps("x").encode()):
        with pytest.raises(PublishError, match="the answer is no JSON object") as refused:
            registry.parsed(body, "the answer")
        assert refused.value.hint
