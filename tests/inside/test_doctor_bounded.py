"""The bounded runner, the judgement of several GPUs, and small pure parts of doctor."""

import os
import signal
import sys
import time
from pathlib import Path

import blackwell
import pytest
from blackwell.doctor import bounded
from blackwell.doctor.checks_cache import is_network, mount_of, parse_mounts
from blackwell.doctor.checks_software import normalize, read_constraints, same_version
from blackwell.doctor.peers import Measured, judge, run_sum


def test_reports_before_a_crash_are_kept() -> None:
    def crash(report: bounded.Report) -> None:
        report("first")
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = bounded.run(crash, 5)
    assert outcome.reports == ("first",)
    assert outcome.problem == "died of SIGKILL"
    assert "last words" in outcome.output


def test_hang_is_ended_with_its_children() -> None:
    def hang(report: bounded.Report) -> None:
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        report(pid)
        time.sleep(60)

    outcome = bounded.run(hang, 0.5)
    assert "no answer within" in outcome.problem
    assert outcome.seconds < 2
    grandchild = outcome.reports[0]
    for _ in range(100):
        try:
            with open(f"/proc/{grandchild}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {grandchild} is still there")


def test_exception_is_the_problem() -> None:
    def fail(report: bounded.Report) -> None:
        raise SystemExit("a library left")

    assert "a library left" in bounded.run(fail, 5).problem


def test_much_output_does_not_block() -> None:
    def talk(report: bounded.Report) -> None:
        sys.stdout.write("x" * (4 << 20))
        report(b"y" * (4 << 20))

    outcome = bounded.run(talk, 10)
    assert len(outcome.output) == 4 << 20
    assert len(outcome.reports[0]) == 4 << 20


def test_several_run_at_once() -> None:
    children = [bounded.start(lambda report: time.sleep(0.4)) for _ in range(4)]
    begin = time.monotonic()
    outcomes = bounded.collect(children, [5] * 4)
    assert time.monotonic() - begin < 1.5
    assert [outcome.problem for outcome in outcomes] == [""] * 4


# ---- advice on peer-to-peer rests on evidence

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(blackwell.__file__).parents[1])}
RIGHT = Measured(state="right")
HUNG = Measured(state="hung", text="no answer within 6 s")
WRONG = Measured(state="wrong", text="rank 1: 4096 elements differ")


def test_peer_to_peer_is_blamed_only_when_the_sum_is_right_without_it() -> None:
    for bad in (HUNG, WRONG):
        found = judge(bad, RIGHT, RIGHT)
        assert found.verdict == "fail" and "NCCL_P2P_DISABLE=1" in found.todo
    other = judge(HUNG, HUNG, RIGHT)
    assert other.verdict == "fail" and "peer-to-peer alone is not the cause" in other.todo
    assert judge(HUNG, Measured(state="not run"), RIGHT).todo == other.todo
    assert judge(RIGHT, RIGHT, RIGHT).verdict == "pass"


def test_wrong_copies_fail_though_the_sum_is_right() -> None:
    assert judge(RIGHT, RIGHT, WRONG).verdict == "fail"


@pytest.mark.slow
def test_sum_over_real_processes() -> None:
    """The worker itself, over gloo on the processor: two ranks agree."""
    pytest.importorskip("torch")
    assert run_sum(2, 50, ENVIRONMENT, "gloo").state == "right"


def test_sum_that_gets_no_answer_is_hung() -> None:
    """Three ranks are announced, their start takes longer than the time given."""
    measured = run_sum(3, 1.0, ENVIRONMENT, "gloo")
    assert measured.state == "hung"


# ---- pure parts


def test_mount_table() -> None:
    text = (
        "22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "40 22 0:33 / /mnt/my\\040data rw - nfs4 server:/x rw\n"
        "41 22 0:34 / /mnt/mydata2 rw - fuse.gcsfuse bucket rw\n"
    )
    mounts = parse_mounts(text)
    assert mount_of("/mnt/my data/cache", mounts) == ("/mnt/my data", "nfs4")
    assert mount_of("/mnt/mydata", mounts) == ("/", "ext4")
    assert is_network("nfs4") and is_network("fuse.gcsfuse")
    assert not is_network("ext4") and not is_network("fuse.fuse-overlayfs") and not is_network("overlay")


def test_constraints() -> None:
    pins = read_constraints("# locked\nTorch==2.12.1 ; python_version > '3'\nfla_core == 0.6.0\n-r other\n")
    assert pins == {"torch": "2.12.1", "fla-core": "0.6.0"}
    assert normalize("Flash_Linear.Attention") == "flash-linear-attention"
    assert same_version("2.12.1+cu130", "2.12.1")
    assert not same_version("2.12.1", "2.12.1+cu130")
    assert not same_version("2.12.10", "2.12.1")
