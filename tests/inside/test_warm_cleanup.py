"""What is noise in a cache goes, and what a job uses stays."""

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
    noise = [
        "triton/ABC/tmp.pid_1_x/k.cubin",
        "inductor/locks/a.lock",
        "inductor/cache/deadbeef",
        "inductor/ab/x.lock",
        "inductor/ab/.123.tmp",
    ]
    fill(tmp_path, *kept, *noise)
    removed = cleanup.remove_noise(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert len(removed) == 5
    assert cleanup.remove_noise(tmp_path) == []


def test_empty_directories_go_but_not_the_two_caches(tmp_path: Path) -> None:
    fill(tmp_path, "inductor/locks/a.lock", "triton/X/lock")
    cleanup.remove_noise(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inductor", "triton"]
