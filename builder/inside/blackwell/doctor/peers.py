"""Do several GPUs talk to each other rightly? A sum over NCCL and a pattern copied between every two GPUs.

On some boards (GeForce, RTX, some IOMMU settings) peer-to-peer copies hang or, worse, deliver wrong bytes. Each
measurement runs in processes of its own with a time limit, once as NCCL likes and once with NCCL_P2P_DISABLE=1, so that
the advice rests on evidence. `python -m blackwell.doctor.peers sum|copy` is the worker.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blackwell.doctor.finding import Finding, failed, passed, skipped, warned

State = Literal["right", "wrong", "hung", "failed", "not run"]
ELEMENTS = 4 << 20
"""float32 elements of the summed tensor: 16 MiB, large enough for NCCL's peer-to-peer path."""
PERIOD = 251
"""The pattern repeats with a prime, so that a shifted or swapped block shows."""
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How one measurement ended, and what it said."""

    state: State
    text: str = ""


def judge(direct: Measured, without: Measured, copied: Measured) -> Finding:
    """The advice that the evidence allows: `direct` is the sum as NCCL likes, `without` with peer-to-peer off."""
    bad_sum = direct.state in ("wrong", "hung", "failed")
    bad_copy = copied.state in ("wrong", "hung", "failed")
    if direct.state == "not run":
        return skipped(f"not measured: {direct.text}")
    if bad_sum and without.state == "right":
        return failed(
            f"the sum over all GPUs is {_say(direct)} with peer-to-peer and right without",
            "set NCCL_P2P_DISABLE=1, or switch off the IOMMU or PCIe ACS on the host",
        )
    if bad_sum:
        return failed(
            f"the sum over all GPUs is {_say(direct)}, and with NCCL_P2P_DISABLE=1 {_say(without)}",
            "look at NCCL_DEBUG=INFO, /dev/shm and the host's dmesg; peer-to-peer alone is not the cause",
        )
    if bad_copy:
        return failed(
            f"NCCL's sum is right, but copies between GPUs: {_say(copied)}",
            "set NCCL_P2P_DISABLE=1 and avoid direct copies between GPUs; switch off the IOMMU or PCIe ACS on the host",
        )
    if without.state in ("wrong", "hung", "failed"):
        return warned(
            f"the sum is right, but with NCCL_P2P_DISABLE=1 {_say(without)}",
            "check /dev/shm; don't set NCCL_P2P_DISABLE here",
        )
    return passed(f"sum right with peer-to-peer, {_say(without)} without; copies {_say(copied)}")


def _say(measured: Measured) -> str:
    return f"{measured.state} ({measured.text})" if measured.text else measured.state


def measure(count: int, seconds: float, backend: str = "nccl") -> tuple[Measured, Measured, Measured]:
    """Run all three measurements on `count` GPUs within `seconds`: sum, sum without peer-to-peer, copies."""
    end = time.monotonic() + seconds
    plain = {name: value for name, value in os.environ.items() if name not in ("NCCL_P2P_DISABLE", "NCCL_DEBUG")}
    direct = run_sum(count, seconds * 0.4, plain, backend)
    without = run_sum(count, max(0.0, end - time.monotonic()) * 0.6, {**plain, "NCCL_P2P_DISABLE": "1"}, backend)
    return direct, without, run_copies(max(0.0, end - time.monotonic()), plain)


def run_sum(count: int, seconds: float, environment: Mapping[str, str], backend: str) -> Measured:
    """Start one process per GPU; all must say that the sum is right. Meeting place: a file, no network address."""
    with tempfile.TemporaryDirectory(prefix="blackwell-peers-") as directory:
        meeting = os.path.join(directory, "meeting")
        argv = [
            sys.executable,
            "-m",
            "blackwell.doctor.peers",
            "sum",
            "--world",
            str(count),
            "--meeting",
            meeting,
            "--backend",
            backend,
        ]
        return _run([[*argv, "--rank", str(rank)] for rank in range(count)], seconds, environment)


def run_copies(seconds: float, environment: Mapping[str, str]) -> Measured:
    """Copy a pattern between every two GPUs, directly and through host memory."""
    return _run([[sys.executable, "-m", "blackwell.doctor.peers", "copy"]], seconds, environment)


def _run(commands: Sequence[Sequence[str]], seconds: float, environment: Mapping[str, str]) -> Measured:
    if seconds < 1:
        return Measured(state="not run", text="no time left")
    end = time.monotonic() + seconds
    processes = [
        subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for argv in commands
    ]
    try:
        said = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired:
        return Measured(state="hung", text=f"no answer within {seconds:.0f} s")
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGKILL)
    for process, text in zip(processes, said, strict=True):
        last = text.strip().splitlines()[-1] if text.strip() else f"exit code {process.returncode}"
        if process.returncode == 3:
            return Measured(state="wrong", text=last)
        if process.returncode != 0:
            return Measured(state="failed", text=last)
    return Measured(state="right")


def worker_sum(rank: int, world: int, meeting: str, backend: str) -> int:
    """All-reduce `(rank + 1) * pattern` and compare with the sum computed here; exit code 3 when it differs."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    pattern = torch.arange(ELEMENTS, device=device).remainder(PERIOD).float()
    expected = pattern * (world * (world + 1) // 2)  # small integers: exact in float32 in any order of summation
    for turn in range(ROUNDS):
        value = pattern * (rank + 1)
        dist.all_reduce(value)
        wrong = int((value != expected).sum())
        if wrong:
            print(f"rank {rank}, round {turn}: {wrong} of {ELEMENTS} elements differ", flush=True)
            return 3
    return 0


def worker_copy() -> int:
    """Copy between every two GPUs; exit code 3 when bytes differ that are right by way of the host."""
    import torch

    pattern = torch.arange(ELEMENTS).remainder(PERIOD).float()
    count = torch.cuda.device_count()
    for source in range(count):
        on_source = pattern.to(f"cuda:{source}")
        for target in (other for other in range(count) if other != source):
            direct = int((on_source.to(f"cuda:{target}").cpu() != pattern).sum())
            staged = int((on_source.cpu().to(f"cuda:{target}").cpu() != pattern).sum())
            if direct or staged:
                print(
                    f"GPU {source} to {target}: {direct} of {ELEMENTS} elements differ, {staged} by way of the host",
                    flush=True,
                )
                return 3
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The worker processes; not for people."""
    parser = argparse.ArgumentParser(prog="python -m blackwell.doctor.peers")
    parser.add_argument("work", choices=["sum", "copy"])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--meeting", default="")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    args = parser.parse_args(argv)
    return worker_copy() if args.work == "copy" else worker_sum(args.rank, args.world, args.meeting, args.backend)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # NCCL's threads must not turn a right answer into a hang at exit
