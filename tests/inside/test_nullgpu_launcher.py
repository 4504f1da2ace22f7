"""The launcher, card profiles and build script: no torch, no subprocess but the compiled guard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blackwell import nullgpu, paths
from nullgpu_helper import built_library, needs_compiler


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the built libraries, named in this process's environment."""
    directory = built_library()
    monkeypatch.setenv("BLACKWELL_NULLGPU_LIB", str(directory))
    return directory


BLACKWELL = {
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("12.0", 188),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ("12.0", 188),
    "NVIDIA GeForce RTX 5090": ("12.0", 170),
    "NVIDIA GB10": ("12.1", 48),
    "NVIDIA B200": ("10.0", 148),
    "NVIDIA B300 SXM6 AC": ("10.3", 148),
    "NVIDIA H200": ("9.0", 132),
}


def test_every_card_has_a_profile() -> None:
    cards = nullgpu.cards()
    assert {
        name: (card.capability, card.attributes["multiprocessor_count"]) for name, card in cards.items()
    } == BLACKWELL


@pytest.mark.parametrize("name", BLACKWELL)
def test_a_profile_holds_its_capabilitys_limits(name: str) -> None:
    a = nullgpu.cards()[name].attributes
    small = a["compute_capability_major"] == 12
    assert a["max_threads_per_multiprocessor"] == (1536 if small else 2048)
    assert a["max_blocks_per_multiprocessor"] == (24 if small else 32)
    assert a["max_shared_memory_per_multiprocessor"] == (102400 if small else 233472)
    assert (
        a["max_shared_memory_per_block_optin"]
        == a["max_shared_memory_per_multiprocessor"] - a["reserved_shared_memory_per_block"]
    )
    assert a["max_registers_per_block"] == a["max_registers_per_multiprocessor"] == 65536


@pytest.mark.parametrize("name", BLACKWELL)
def test_a_profile_says_where_it_is_from(name: str) -> None:
    card = nullgpu.cards()[name]
    assert len(card.source) > 40
    assert card.measured == (name == "NVIDIA H200")
    assert card.measured == (not card.inherited), (
        "a measured profile inherits nothing, another one says what it inherits"
    )


def test_attributes_reach_the_library_by_number() -> None:
    encoded = nullgpu.cards()["NVIDIA B200"].encoded()
    fields = dict(item.split("=", 1) for item in encoded.split(";"))
    assert fields["name"] == "NVIDIA B200" and fields["memory"] == "191490555904"
    assert (fields["75"], fields["76"], fields["16"], fields["97"]) == ("10", "0", "148", "232448")


def test_a_profile_survives_writing_and_reading() -> None:
    import tomllib

    card = nullgpu.cards()["NVIDIA H200"]
    profile = {key: getattr(card, key) for key in ("name", "memory", "driver", "measured", "source", "attributes")}
    assert nullgpu.card_from_dict(tomllib.loads(nullgpu.profile_toml(profile)), "round trip") == card


def test_wrong_profiles_are_refused_with_every_reason() -> None:
    with pytest.raises(
        nullgpu.NullGpuError, match=r"name is missing.*compute_capability_major is missing.*smms is no device attribute"
    ):
        nullgpu.card_from_dict({"attributes": {"smms": 1}}, "x.toml")


def test_measured_profiles_of_the_user_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (paths.data("cards") / "b200.toml").read_text().replace("memory = 191490555904", "memory = 7")
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setenv("BLACKWELL_CARDS", str(tmp_path))
    assert nullgpu.cards()["NVIDIA B200"].memory == 7


def test_an_unknown_card_names_the_near_ones() -> None:
    with pytest.raises(nullgpu.NullGpuError, match="did you mean 'NVIDIA GeForce RTX 5090'"):
        nullgpu.environment("RTX 5090")


def test_missing_libraries_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLACKWELL_NULLGPU_LIB", str(tmp_path))
    monkeypatch.setattr(nullgpu, "driver_visible", lambda: False)
    with pytest.raises(nullgpu.NullGpuError, match=r"holds 0 libcuda.so.N.*build.py"):
        nullgpu.environment("NVIDIA B200")


def test_a_real_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nullgpu, "driver_visible", lambda: True)
    monkeypatch.delenv("BLACKWELL_NULLGPU_BESIDE_DRIVER", raising=False)
    with pytest.raises(nullgpu.NullGpuError, match="a real NVIDIA driver is visible"):
        nullgpu.environment("NVIDIA B200")


@pytest.mark.parametrize("count", [0, 17])
def test_device_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(nullgpu.NullGpuError, match="1 to 16"):
        nullgpu.environment("NVIDIA B200", count)


def test_this_process_is_not_under_it() -> None:
    assert not nullgpu.is_on()


def test_profiles_are_not_measured_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*nullgpu.SWITCH)
    with pytest.raises(nullgpu.NullGpuError, match="can't be measured under the null GPU"):
        nullgpu.dump_profile()


needs_sources = pytest.mark.skipif(
    not (Path(nullgpu.__file__).parents[1] / "nullgpu").is_dir(), reason="the null GPU's sources are not in the image"
)


@needs_compiler
class TestBuilt:
    """Against the built libraries."""

    def test_environment_of_a_child(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
        monkeypatch.setattr(nullgpu, "driver_visible", lambda: False)
        before = dict(os.environ)
        variables = nullgpu.environment("NVIDIA GB10", 3)
        assert dict(os.environ) == before, "only the child is under the null GPU"
        assert variables["NULLGPU_COUNT"] == "3" and variables["TRITON_LIBCUDA_PATH"] == str(library)
        files = variables["LD_PRELOAD"].split(":")
        assert Path(files[0]).name == "libcuda.so.1" and files[-1] == "/lib/other.so" and len(files) == 7

    def test_it_says_that_it_is_on(
        self, library: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nullgpu, "driver_visible", lambda: False)
        code = nullgpu.run(
            [sys.executable, "-c", "import os; raise SystemExit(int(os.environ['NULLGPU_COUNT']))"], "NVIDIA B200", 2
        )
        assert capfd.readouterr().err == "null GPU: 2 x NVIDIA B200 (10.0), no kernel runs, results are garbage\n"
        assert code == 2

    def test_preloading_alone_ends_the_process(self, library: Path) -> None:
        done = subprocess.run(
            ["true"], env={"LD_PRELOAD": str(library / "libcuda.so.1")}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 99 and "preloaded, but not switched on" in done.stderr

    def test_the_switch_needs_a_card(self, library: Path) -> None:
        env = {"LD_PRELOAD": str(library / "libcuda.so.1"), nullgpu.SWITCH[0]: nullgpu.SWITCH[1]}
        done = subprocess.run(["true"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 99 and "without a card" in done.stderr

    @needs_sources
    def test_symbols_and_versions_are_the_real_ones(self, library: Path) -> None:
        import sysconfig

        sys.path.insert(0, str(Path(nullgpu.__file__).parents[1] / "nullgpu"))
        import build

        site = Path(sysconfig.get_paths()["purelib"])
        for entry in build.LIBRARIES:
            if entry.pattern:
                real = build.real_library(site, entry)
                assert build.exported_functions(library / real.name) == build.exported_functions(real), real.name

    @needs_sources
    def test_allowed_names_exist(self, library: Path) -> None:
        """A name in allowed.toml that the newest libraries lack is a typing error; older ones may lack some."""
        if not (library / "libcudart.so.13").is_file():
            pytest.skip("allowed.toml is checked against CUDA 13's libraries")
        import fnmatch
        import tomllib

        sys.path.insert(0, str(Path(nullgpu.__file__).parents[1] / "nullgpu"))
        import build

        allowed = tomllib.loads((build.HERE / "allowed.toml").read_text())
        unknown = []
        for entry in build.LIBRARIES:
            file = next(library.glob(f"{entry.key}.so.*"))
            names = [s.name for s in build.exported_functions(file)]
            unknown += [p for p in allowed[entry.key]["allowed"] if not any(fnmatch.fnmatchcase(n, p) for n in names)]
        assert not unknown
