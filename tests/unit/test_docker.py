"""What a killed Docker daemon leaves does not keep the next one from starting."""

import os
from pathlib import Path

from builder.engine.docker import drop_stale_pid_file


def test_the_file_of_a_process_that_is_gone_or_another_program_goes(tmp_path: Path) -> None:
    path = tmp_path / "docker.pid"
    for pid in ("99999999", str(os.getpid())):
        path.write_text(pid)
        drop_stale_pid_file(path, "dockerd")
        assert not path.exists()


def test_the_file_of_a_running_daemon_and_one_that_is_no_number_stay(tmp_path: Path) -> None:
    path = tmp_path / "docker.pid"
    path.write_text(str(os.getpid()))
    drop_stale_pid_file(path, Path("/proc/self/comm").read_text().strip())
    assert path.exists()
    path.write_text("no number")
    drop_stale_pid_file(path, "dockerd")
    assert path.exists()


def test_no_file_is_no_error(tmp_path: Path) -> None:
    drop_stale_pid_file(tmp_path / "none", "dockerd")
