"""What a killed Docker daemon leaves does not keep the next one from starting."""

import os
from pathlib import Path

import pytest

from builder.engine import docker, process, registry
from builder.engine.docker import drop_stale_pid_file
from builder.engine.skopeo import Access
from builder.errors import EngineError, PublishError


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


@pytest.mark.parametrize("settings", ["[1]", "3", '{"auths": [1]}'])
def test_settings_of_docker_that_are_none_are_named(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(settings)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    access = Access(authfile=tmp_path / "config.json")
    with pytest.raises(PublishError) as refused:
        registry.Repository(name="r.example.com/x", access=access, run=process.run)._basic()
    assert "docker login" in refused.value.hint
    monkeypatch.setattr(docker.docker, "from_env", lambda **_: [].get)
    with pytest.raises(EngineError, match="settings of the docker command"):
        docker.probe(process.run)
