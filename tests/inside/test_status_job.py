"""`blackwell status` on real processes and real logs, as another process sees them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blackwell
import pytest
from blackwell import nullgpu
from blackwell.status import EXIT_CODES

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(blackwell.__file__).parents[1])}
BUSY = "import time\nwhile True: print('step', flush=True); time.sleep(0.1)"
SILENT = "import time\nprint('step 1', flush=True); time.sleep(600)"
RAISES = "def inner(): raise RuntimeError('loss is nan')\ndef outer(): inner()\nprint('step 1', flush=True); outer()"


class Jobs:
    """Jobs with an unmistakable name in their command line, whose output goes to a log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []
        self.name = f"job-{os.getpid()}-{directory.name}"

    def start(self, code: str, log: str = "job.log") -> subprocess.Popen[bytes]:
        """Start a job; it is ended after the test."""
        script = self.directory / f"{self.name}.py"
        script.write_text(code)
        with open(self.directory / log, "ab") as out:
            job = subprocess.Popen([sys.executable, str(script)], stdout=out, stderr=out, env=ENVIRONMENT)
        self.started.append(job)
        return job

    @property
    def log(self) -> Path:
        """The log that jobs write to unless told otherwise."""
        return self.directory / "job.log"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that end with the test."""
    made = Jobs(tmp_path)
    yield made
    for job in made.started:
        job.kill()
        job.wait()


def status(*options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; exit code and document must agree."""
    argv = [sys.executable, "-m", "blackwell", "status", "--json", *options]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == EXIT_CODES[document["verdict"]], done.stderr
    return done.returncode, document


def wait_for(log: Path, text: str) -> None:
    """Wait until a job has written something."""
    for _ in range(400):
        if log.exists() and text in log.read_text(errors="replace"):
            return
        time.sleep(0.05)
    pytest.fail(f"{log} never held {text!r}")


def test_exit_codes_are_distinct_and_free() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not {1, 2} & set(EXIT_CODES.values())  # Python's own failures and wrong usage


def test_running(jobs: Jobs) -> None:
    job = jobs.start(BUSY)
    wait_for(jobs.log, "step")
    code, document = status("--match", jobs.name)
    assert (code, document["verdict"]) == (0, "running")
    assert [process["pid"] for process in document["processes"]["value"]] == [job.pid]
    log = document["log"]["value"]
    assert log["path"] == str(jobs.log), "the log is found through the process's own stdout"
    assert log["age"] < 10 and log["lines"][-1] == "step"


def test_processes_are_found_through_the_log_they_hold_open(jobs: Jobs) -> None:
    job = jobs.start(BUSY)
    wait_for(jobs.log, "step")
    with open(jobs.log):  # a reader, such as `tail -f`, is no job
        _, document = status("--log", str(jobs.log))
    assert document["verdict"] == "running"
    assert [process["pid"] for process in document["processes"]["value"]] == [job.pid]


def test_stalled_when_the_log_stands_still(jobs: Jobs) -> None:
    jobs.start(SILENT)
    wait_for(jobs.log, "step 1")
    old = time.time() - 1000
    os.utime(jobs.log, (old, old))
    code, document = status("--match", jobs.name, "--stall", "60")
    assert (code, document["verdict"]) == (11, "stalled")
    assert "17 min" in document["reason"]
    assert status("--match", jobs.name, "--stall", "2000")[1]["verdict"] == "running"


def test_stopped_process_is_stalled(jobs: Jobs) -> None:
    job = jobs.start(BUSY)
    wait_for(jobs.log, "step")
    job.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert status("--match", jobs.name)[1]["verdict"] == "stalled"


def test_crashed_with_the_whole_traceback(jobs: Jobs) -> None:
    jobs.start(RAISES).wait()
    code, document = status("--log", str(jobs.log))
    assert (code, document["verdict"]) == (12, "crashed")
    text = "\n".join(document["log"]["value"]["traceback"])
    assert text.startswith("Traceback (most recent call last):")
    assert "in inner" in text and "in outer" in text
    assert text.endswith("RuntimeError: loss is nan")
    assert "loss is nan" in document["reason"]


def test_one_rank_crashed_and_the_other_waits(jobs: Jobs) -> None:
    jobs.start(RAISES).wait()
    jobs.start(SILENT)
    wait_for(jobs.log, "loss is nan")
    time.sleep(0.5)
    old = time.time() - 1000
    os.utime(jobs.log, (old, old))
    code, document = status("--match", jobs.name, "--log", str(jobs.log))
    assert code == 11
    assert "loss is nan" in document["reason"]


def test_killed_and_not_yet_reaped_tells_the_signal(jobs: Jobs) -> None:
    """A zombie has no command line left, only its name."""
    job = jobs.start(BUSY)
    wait_for(jobs.log, "step")
    job.kill()
    time.sleep(0.3)  # it stays a zombie until the fixture waits for it
    code, document = status("--match", "^python")
    found = document["processes"]["value"]
    assert [process["exit_status"] for process in found if process["pid"] == job.pid] == ["SIGKILL"]
    if all(process["state"] == "Z" for process in found):  # other Python programs may run on this machine
        assert code == 12


def test_finished(jobs: Jobs) -> None:
    jobs.start("print('done')").wait()
    code, document = status("--log", str(jobs.log))
    assert (code, document["verdict"]) == (10, "finished")


def test_traceback_that_the_job_survived_is_no_crash(jobs: Jobs) -> None:
    survive = RAISES.replace(
        "; outer()", "\nimport traceback\ntry: outer()\nexcept RuntimeError: traceback.print_exc()\n"
    )
    jobs.start(survive + "for step in range(200): print('step', step)").wait()
    code, document = status("--log", str(jobs.log))
    assert code == 10
    assert document["log"]["value"]["traceback"][-1] == "RuntimeError: loss is nan"


def test_nothing_to_judge_by_is_unknown_and_says_why(jobs: Jobs) -> None:
    code, document = status("--match", "no-such-process-anywhere")
    assert (code, document["verdict"]) == (13, "unknown")
    assert document["log"]["problem"]
    assert document["gpus"]["value"] or document["gpus"]["problem"]


def test_every_part_answers_though_the_log_is_missing(jobs: Jobs) -> None:
    job = jobs.start(BUSY)
    wait_for(jobs.log, "step")
    code, document = status("--match", jobs.name, "--log", str(jobs.directory / "typo.log"))
    assert code == 0
    assert "typo.log" in document["log"]["problem"]
    assert document["processes"]["value"][0]["pid"] == job.pid


def test_pipe_as_log_does_not_hang(jobs: Jobs) -> None:
    pipe = jobs.directory / "pipe"
    os.mkfifo(pipe)
    begin = time.monotonic()
    _, document = status("--log", str(pipe))
    assert "no regular file" in document["log"]["problem"]
    assert time.monotonic() - begin < 10


def test_wrong_pattern_is_wrong_usage() -> None:
    argv = [sys.executable, "-m", "blackwell", "status", "--match", "("]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "no regular expression" in done.stderr


def test_text_for_people(jobs: Jobs) -> None:
    jobs.start(RAISES).wait()
    argv = [sys.executable, "-m", "blackwell", "status", "--log", str(jobs.log)]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("crashed: ")
    for word in ("processes:", "GPUs:", "log:", "traceback:", "RuntimeError: loss is nan"):
        assert word in done.stdout


@pytest.mark.skipif(nullgpu.driver_visible(), reason="an NVIDIA driver is visible here")
def test_without_a_driver_it_says_what_to_do_and_no_library_errors(jobs: Jobs) -> None:
    jobs.start(BUSY)
    done = subprocess.run(
        [sys.executable, "-m", "blackwell", "status", "--match", jobs.name],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "no NVIDIA driver is visible here: start the container with --gpus all" in done.stdout
    assert "Errno" not in done.stdout and "cannot open shared object" not in done.stdout
