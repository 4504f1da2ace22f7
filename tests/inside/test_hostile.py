"""What a hostile tester did to the `blackwell` command inside an image: each kind of it is answered by a sentence, and stays so."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import blackwell
import pytest
from blackwell.kernels import seal, sealing, sums, verify_cache
from blackwell.kernels.repair import relocate, repair

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(blackwell.__file__).resolve().parents[1])}
BLACKWELL = [sys.executable, "-m", "blackwell"]


def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BLACKWELL, *words], env={**ENVIRONMENT, **more}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed cache with thirty harmless files of the one kind that has no structure of its own."""
    cache = tmp_path / "cache"
    for name in (f"inductor/ab/{index}.best_config" for index in range(30)):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text("{}")
    (cache / "triton").mkdir()
    seal(cache, {"capabilities": ["12.0"], "cards": []})
    assert verify_cache(cache) == []
    return cache


LISTS = {
    "emptied": lambda text: b"",
    "random": lambda text: os.urandom(5000),
    "its first lines are gone": lambda text: b"".join(text.splitlines(keepends=True)[10:]),
    "cut off": lambda text: text[: len(text) // 2],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_damaged_checksum_list_is_damage(name: str, sealed: Path) -> None:
    """Otherwise nothing else would be noticed any more."""
    path = sealed / sums.LIST
    facts = path.stat()
    path.write_bytes(LISTS[name](path.read_bytes()))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    done = call("kernels", "verify", "--cache", str(sealed), "--json")
    assert done.returncode == 1
    assert sums.LIST in [damage["path"] for damage in json.loads(done.stdout)["damages"]]
    repair(sealed)
    assert verify_cache(sealed) == []
    assert set(sums.read_list(sealed) or {}) == set(sums.listed_files(sealed)), "made anew of the files as they are"


def test_what_a_job_added_after_the_sealing_is_no_damage_of_the_list(sealed: Path) -> None:
    time.sleep(0.02)
    (sealed / "inductor/ab/new.best_config").write_text("{}")
    assert verify_cache(sealed) == []


def test_a_relocated_cache_is_at_its_place(sealed: Path, tmp_path: Path) -> None:
    """`explain` asked to run the very command that had been run."""
    moved = tmp_path / "moved"
    shutil.copytree(sealed, moved)
    relocate(moved, str(sealed), str(moved))
    keys = sealing.read_keys(moved)
    assert keys is not None and keys["path"] == str(moved)
    assert verify_cache(moved) == []
    assert relocate(moved, str(sealed), str(moved)) == []


@pytest.mark.parametrize(
    "content", ['{"child_paths": 5}', "[1]", '{"a": 5}', "[" * 100_000], ids=lambda text: text[:15]
)
def test_relocate_leaves_damaged_groups_to_repair(content: str, sealed: Path) -> None:
    group = sealed / "triton" / "KEY" / "__grp__k.json"
    group.parent.mkdir()
    group.write_text(content)
    assert call("kernels", "relocate", "/old", "/new", "--cache", str(sealed)).returncode == 0
    assert group.read_text() == content


@pytest.mark.parametrize("keys", ["{}", "[]", '{"capabilities": 3}'])
def test_explain_with_damaged_keys(keys: str, sealed: Path) -> None:
    (sealed / sealing.KEYS).write_text(keys)
    done = call("kernels", "explain", "k", "--card", "x", "--capability", "12.0", "--cache", str(sealed), "--json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert sealing.KEYS in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(
    "words",
    [("kernels", "explain", "k", "--capability", "abc"), ("status", "--stall", "nan"), ("status", "--stall", "-5")],
)
def test_words_that_mean_nothing(words: tuple[str, ...]) -> None:
    done = call(*words)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_file_in_the_place_of_tritons_directory(sealed: Path) -> None:
    shutil.rmtree(sealed / "triton")
    (sealed / "triton").write_text("")
    done = call("kernels", "repair", "--cache", str(sealed), "--json")
    assert "Traceback" not in done.stderr and json.loads(done.stdout)


@pytest.mark.parametrize("words", [("kernels", "list", "--json"), ("status",), ("doctor", "--json")], ids=" ".join)
def test_a_reader_who_has_seen_enough(words: tuple[str, ...], sealed: Path) -> None:
    process = subprocess.Popen(
        [*BLACKWELL, *words],
        env={**ENVIRONMENT, "BLACKWELL_CACHE": str(sealed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_an_answer_for_which_there_is_no_room(sealed: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*BLACKWELL, "kernels", "list", "--json", "--cache", str(sealed)],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr and "No space left" in done.stderr


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(100)"
    process = subprocess.Popen(
        [*BLACKWELL, "warm", "--cache", str(tmp_path / "c"), "--card", "NVIDIA B200", "--", sys.executable, "-c", code],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors and errors.rstrip().endswith("interrupted")


def test_an_empty_log_is_no_finished_job(tmp_path: Path) -> None:
    (tmp_path / "job.log").touch()
    done = call("status", "--log", str(tmp_path / "job.log"), "--json")
    assert json.loads(done.stdout)["verdict"] == "unknown"
    assert "is empty" in json.loads(done.stdout)["reason"]


def test_a_job_that_opens_its_log_for_each_line_is_running(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    writer = subprocess.Popen(["sh", "-c", f"while :; do echo step >> {log}; sleep 0.2; done"])
    try:
        while not log.exists():
            time.sleep(0.05)
        done = call("status", "--log", str(log), "--json")
        assert json.loads(done.stdout)["verdict"] == "running"
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_job_of_another_user_is_not_called_finished() -> None:
    """Its open files can't be looked into."""
    place = Path(tempfile.mkdtemp())  # pytest's own directories are closed to others
    log = place / "job.log"
    log.write_text("step 1\n")
    place.chmod(0o755)
    log.chmod(0o644)
    holder = subprocess.Popen([sys.executable, "-c", f"import time; log = open({str(log)!r}, 'a'); time.sleep(60)"])
    try:
        time.sleep(0.5)
        done = subprocess.run(
            ["setpriv", "--reuid", "1000", "--clear-groups", *BLACKWELL, "status", "--log", str(log), "--json"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert json.loads(done.stdout)["verdict"] == "unknown", done
        assert "ask as the job's user" in json.loads(done.stdout)["reason"]
    finally:
        holder.kill()
        holder.wait()
        shutil.rmtree(place)


def test_finished_admits_what_it_cannot_tell(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1\nstep 2\n")
    done = call("status", "--log", str(log), "--json")
    assert json.loads(done.stdout)["verdict"] == "finished"
    assert "killed from outside looks the same" in json.loads(done.stdout)["reason"]


def test_a_log_that_is_a_directory_is_named(tmp_path: Path) -> None:
    done = call("status", "--log", str(tmp_path), "--json")
    assert str(tmp_path) in json.loads(done.stdout)["log"]["problem"]
