"""Commands that are killed, starved or cut off from the world, as processes: a sentence, a code, nothing half-made, and again."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import oci
from builder.engine import contents, docker, host, scratch
from builder.engine.process import run
from builder.oci import Layout
from tests.engine import registries
from tests.engine.test_publish import Tiny, tiny

__all__ = ["tiny"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]
BUILDER = (sys.executable, "-m", "builder")
# A shell starts its background jobs with Ctrl-C ignored, and so all below them.
HEARS_CTRL_C = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from builder.cli import main; main()"
)


def started(*words: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *words],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=-1,
        stderr=-1,
        text=True,
    )


def half_made(*places: Path) -> list[str]:
    names = [p for place in places for p in place.rglob("*")]
    return [str(p) for p in names if p.name.startswith((scratch.PREFIX, ".new-")) or p.name.endswith(".part")]


@pytest.fixture
def large(tiny: Tiny, tmp_path: Path) -> Iterator[Tiny]:
    """The tiny image, large enough to be killed in the middle of."""
    digest = registries.tiny_image(tiny.engine, tiny.image, tiny.lock, tmp_path / "large", extra=os.urandom(48 << 20))
    registries.verdict(tiny.image, digest, tiny.lock)
    contents.local(tiny.engine, tiny.image.tag, host.store())  # read once, so that publishing begins at once
    yield tiny
    tiny.engine.api.images.remove(digest, force=True)


@pytest.mark.parametrize("form", ["layout", "archive"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_while_publishing_to_files_then_the_same_command_again(
    large: Tiny, tmp_path: Path, number: signal.Signals, form: str
) -> None:
    place = tmp_path / "out"
    place.mkdir()
    path = place / ("layout" if form == "layout" else "image.tar")
    words = ("publish", large.image.id, "--to", f"oci:{path}" if form == "layout" else str(path), "--json")
    killed = started(*words)
    while killed.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if any(p.stat().st_size > 1 << 20 for p in place.rglob("*") if p.is_file()):
                killed.send_signal(number)
                break
        time.sleep(0.002)
    out, err = killed.communicate(timeout=60)
    assert killed.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], err
    assert "Traceback" not in err
    if number is not signal.SIGKILL:
        assert json.loads(out)["exit_code"] == killed.returncode and "same command" in err
        assert half_made(place, host.store()) == []
    assert not path.is_file() and (not path.exists() or Layout(path=path).index() == [])
    again = started(*words)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert json.loads(out)["pushed"] is True and half_made(place, host.store()) == []
    found = contents.resolve(run, None, str(path), host.store(), registries.Access())
    assert found.digest == (docker.inspect(large.engine, large.image.tag) or {})["Id"]


def test_two_publications_into_one_layout_at_once(large: Tiny, tmp_path: Path) -> None:
    words = ("publish", large.image.id, "--to", f"oci:{tmp_path / 'layout'}", "--json")
    ended = [(*p.communicate(timeout=120), p.returncode) for p in [started(*words, "--tag", t) for t in ("one", "two")]]
    assert [code for _, _, code in ended] == [0, 0], ended
    assert sorted(json.loads(out)["pushed"] for out, _, _ in ended) == [False, True]
    layout = Layout(path=tmp_path / "layout")
    assert layout.named("one") and layout.named("two") and layout.named(large.image.id)


@pytest.mark.parametrize("how", ["cut off", "changed", "gone", "no index"])
def test_a_damaged_layout_is_mended_or_named(tiny: Tiny, tmp_path: Path, how: str) -> None:
    path = tmp_path / "layout"
    layout = Layout(path=path)
    first = tiny.publish(f"oci:{path}")
    manifest = json.loads(layout.blob(first.digest).read_text())
    for digest in (first.digest, manifest["config"]["digest"], manifest["layers"][0]["digest"]):
        blob = layout.blob(digest)
        data = blob.read_bytes()
        if how == "no index":
            (path / "index.json").write_text('{"manifests": [1]}')
            with pytest.raises(Exception, match=r"index\.json is no index"):
                tiny.publish(f"oci:{path}")
            return
        blob.unlink()
        if how != "gone":
            blob.write_bytes(data[:-1] if how == "cut off" else data[:-1] + bytes([data[-1] ^ 1]))
        assert tiny.publish(f"oci:{path}").pushed
        assert oci.digest(blob.read_bytes()) == digest
    assert not tiny.publish(f"oci:{path}").pushed


@pytest.mark.parametrize("to", ["", "oci:", "host", "host/UPPER", "host/a:tag", "user:pw@host/a", "host/a b"])
def test_a_place_that_is_none_is_said_before_anything_is_done(tiny: Tiny, to: str) -> None:
    with pytest.raises(Exception, match="is no place to publish to"):
        tiny.publish(to)
    with pytest.raises(Exception, match="is no tag"):
        tiny.publish("oci:x", tags=("no tag",))
    assert not (host.store() / "contents").exists()


def test_an_image_for_another_platform_is_not_begun(tiny: Tiny) -> None:
    other = "linux/arm64" if tiny.engine.platform == "linux/amd64" else "linux/amd64"
    done = started("build", "--triton", "3.7", "--platform", other)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 16 and other in err and "DOCKER_HOST" in err
    assert not (host.store() / "bases").exists()


def test_a_container_that_a_killed_command_left_is_removed(tiny: Tiny) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    api = tiny.engine.api.containers
    left = api.create(tiny.digest, ["nothing"], labels={contents.READER: str(gone.pid)})
    ours = api.create(tiny.digest, ["nothing"], labels={contents.READER: str(os.getpid())})
    try:
        contents.local(tiny.engine, tiny.digest)
        there = {c.id for c in api.list(all=True)}
        assert left.id not in there and ours.id in there
    finally:
        ours.remove()


@pytest.mark.parametrize("words", [["list", "--json"], ["plan", "--triton", "3.7"], ["render", "--triton", "3.7"]])
def test_output_that_takes_nothing(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*BUILDER, *words], cwd=ROOT, stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 28 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has enough
    done = subprocess.run([*BUILDER, *words], cwd=ROOT, stdout=writer, stderr=-1, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "unset"])
def test_any_locale_gives_the_same_bytes(locale: str) -> None:
    bare = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if locale != "unset" else {}
    done = started("render", "--triton", "3.7", **bare)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0 and out == run([*BUILDER, "render", "--triton", "3.7"], cwd=ROOT), err


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_without_a_network_a_lock_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("matrices", "Dockerfile.j2", "builder"):
        shutil.copytree(ROOT / name, tmp_path / name) if (ROOT / name).is_dir() else shutil.copy2(ROOT / name, tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "matrices").rglob("*") if p.is_file()}
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "BUILDER_ROOT": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    argv = ["unshare", "--net", *BUILDER, "lock", "--triton", "3.7"]
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True, check=False, timeout=300)
    assert done.returncode == 22, done.stderr
    assert "can't be reached" in done.stderr and "hint: check the network" in done.stderr
    assert {p: p.read_bytes() for p in (tmp_path / "matrices").rglob("*") if p.is_file()} == before
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
@pytest.mark.parametrize(("options", "words"), [("size=8k", "No space left"), ("ro", "Read-only file system")])
def test_a_store_that_takes_nothing(tiny: Tiny, tmp_path: Path, options: str, words: str) -> None:
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", options, str(tmp_path / "disk"), *BUILDER]
    env = {**os.environ, "BUILDER_STORE": str(tmp_path / "disk" / "store")}
    argv += ["report", tiny.image.id, "--json"]
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True, check=False, timeout=120)
    assert done.returncode == 28 and words in done.stderr and "BUILDER_STORE" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 28
    assert "Traceback" not in done.stderr
