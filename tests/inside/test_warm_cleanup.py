"""What is noise in a cache goes, what a job uses stays, and everybody can read it."""

from pathlib import Path

from blackwell.warm import cleanup


def fill(cache: Path, *names: str) -> None:
    for name in names:
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_noise_goes_and_the_rest_stays(tmp_path: Path) -> None:
    kept = [
        "triton/ABC/k.cubin", "triton/ABC/k.json", "triton/ABC/__grp__k.json", "triton/DEF/k.autotune.json", "inductor/fxgraph/xy/key/hash",
        "inductor/aotautograd/key/hash", "inductor/ab/cab.py", "inductor/ab/deadbeef.best_config", "report.json",
    ]  # fmt: skip
    noise = ["triton/ABC/tmp.pid_1_x/k.cubin", "inductor/locks/a.lock", "inductor/cache/deadbeef", "inductor/ab/x.lock", "inductor/ab/.123.tmp"]
    fill(tmp_path, *kept, *noise)
    removed = cleanup.remove_noise(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert len(removed) == 5
    assert cleanup.remove_noise(tmp_path) == []


def test_empty_directories_go_but_not_the_two_caches(tmp_path: Path) -> None:
    fill(tmp_path, "inductor/locks/a.lock", "triton/X/lock")
    cleanup.remove_noise(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inductor", "triton"]


def test_everybody_can_read(tmp_path: Path) -> None:
    fill(tmp_path, "triton/A/k.cubin", "triton/A/launcher.so")
    (tmp_path / "triton/A").chmod(0o700)
    (tmp_path / "triton/A/k.cubin").chmod(0o600)
    (tmp_path / "triton/A/launcher.so").chmod(0o700)
    cleanup.open_for_reading(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"triton": 0o755, "A": 0o755, "k.cubin": 0o644, "launcher.so": 0o755}
