"""Watched programs: their end is judged right, they are bounded, and a CPU kernel is never built for this host alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blackwell.warm import child, recorder

BASE = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run(code: str, timeout: float = 30.0) -> child.Outcome:
    return child.run([sys.executable, "-c", code], BASE, card="none", timeout=timeout, limits=None)


def test_a_program_that_ends_well() -> None:
    outcome = run("print('hello')")
    assert (outcome.problem, outcome.exit_code, outcome.finished) == (None, 0, True)
    assert "hello" in outcome.output


@pytest.mark.parametrize(
    "code", ["1 / 0", "import sys; sys.exit(3)", "import os; os._exit(4)", "import sys; sys.exit('no')"]
)
def test_a_program_that_fails(code: str) -> None:
    outcome = run(code)
    assert outcome.problem is not None and "exit code" in outcome.problem


def test_os_exit_after_the_work_is_a_good_end() -> None:
    assert run("import os; os._exit(0)").problem is None


def test_a_crash_at_interpreter_exit_after_the_work_is_forgiven() -> None:
    # Registered before the recorder's own handler would be impossible: so crash later, when the interpreter clears its modules.
    code = "import os, signal\nclass Late:\n    def __del__(self, kill=os.kill, pid=os.getpid(), n=signal.SIGKILL): kill(pid, n)\nlate = Late()"
    outcome = run(code)
    assert outcome.exit_code == -9
    assert outcome.problem is None


def test_a_crash_during_the_work_is_not_forgiven() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").problem is not None


def test_a_program_that_hangs_is_ended() -> None:
    outcome = run("import time; time.sleep(600)", timeout=2.0)
    assert outcome.problem == "did not end in its time"
    assert outcome.seconds < 20


def test_a_program_that_hangs_while_leaving_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "EXIT_GRACE", 0.5)
    outcome = run("import time\nclass Late:\n    def __del__(self, sleep=time.sleep): sleep(600)\nlate = Late()")
    assert (outcome.exit_code, outcome.problem) == (None, None)


def gone(pid: int) -> bool:
    """Whether the process ends within some seconds; the kernel takes its time with a killed one."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().split(")")[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_its_children_are_ended_with_it() -> None:
    outcome = run(
        "import subprocess, sys; print('pid', subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    pid = int(outcome.output.split("pid ")[1].split()[0])
    assert gone(pid)


def test_a_later_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine ran')")
    environment = {**BASE, "PYTHONPATH": f"{tmp_path}{os.pathsep}{BASE['PYTHONPATH']}"}
    outcome = child.run([sys.executable, "-c", "pass"], environment, card="none", timeout=30, limits=None)
    assert outcome.output.count("mine ran") == 1
    assert outcome.finished, "the recorder ran as well"


def test_events_cut_off_by_a_kill_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"event": "end"}\n{"event": "ker')
    assert child.read_events(tmp_path / "1.jsonl") == [{"event": "end"}]


def test_the_recorder_is_off_without_its_variable() -> None:
    code = "import sys; print(any(type(finder).__name__ == 'AfterImport' for finder in sys.meta_path))"
    hook = str(Path(child.__file__).with_name("hook"))
    environment = {**BASE, "PYTHONPATH": f"{hook}{os.pathsep}{BASE['PYTHONPATH']}"}
    environment.pop(recorder.EVENTS, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_native_becomes_the_baseline(tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"]}
    child.baseline_compiler(tmp_path / "bin", variables)
    command = ["g++", "-march=native", "-E", "-dM", "-x", "c++", "-DSPACE=a b", "/dev/null"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert "#define SPACE a b" in done.stdout, "arguments pass through whole"
    assert "__AVX512F__" not in done.stdout
    if os.uname().machine == "x86_64":
        assert "__AVX2__" in done.stdout


def test_a_module_that_was_only_looked_for_is_still_watched(tmp_path: Path) -> None:
    """torch asks `find_spec("triton")` long before it imports it."""
    (tmp_path / "watched.py").write_text("value = 1")
    code = (
        f"import sys, importlib.util; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from blackwell.after_import import AfterImport\n"
        "seen = []\n"
        "sys.meta_path.insert(0, AfterImport({'watched': lambda module: seen.append(module.value)}))\n"
        "assert importlib.util.find_spec('watched') is not None and importlib.util.find_spec('watched') is not None\n"
        "import watched, importlib\n"
        "importlib.reload(watched)\n"
        "assert seen == [1], seen"
    )
    subprocess.run([sys.executable, "-c", code], env=BASE, check=True, timeout=30)


def test_interrupted_work_leaves_no_process(tmp_path: Path) -> None:
    """As when a build is cancelled: the command gets SIGTERM while a program runs."""
    code = (
        "import sys, threading, signal\n"
        "from blackwell.warm import child, engine\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "sleeper = [sys.executable, '-c', 'import os, sys, time; open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(600)', sys.argv[1]]\n"
        "import os\n"
        "engine._side_by_side(lambda card: child.run(sleeper, dict(os.environ), card=card, timeout=500, limits=None), ['a'], 1)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")], env=BASE)
    pid = tmp_path / "pid"
    for _ in range(600):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.05)
    command.terminate()
    assert command.wait(30) == 143
    assert gone(int(pid.read_text()))
