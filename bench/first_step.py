"""The first training step on a real card: cold, warmed without a GPU, and warmed but with nothing chosen for the autotuners.

  python bench/first_step.py --wheels DIR --out $OUT                 on a machine with a card
  python bench/first_step.py --rehearse --card "NVIDIA H200"         without one: the card's part runs under the null GPU as well

Needs this repository, an installed CUDA torch with Triton, gcc, and (installed or as wheels in DIR) fla-core, flash-linear-attention,
transformers. Fills the caches under the null GPU, then runs the same programs on the card: the C compiler is taken away by PATH, and
what is compiled is counted by Triton and Dynamo themselves. Prints tables and writes first_step.json. Standard library only.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INSIDE = ROOT / "builder" / "inside"
HOPPER = "BLACKWELL_BENCH_HOPPER"
PROFILE = "BLACKWELL_BENCH_PROFILE"

# `blackwell tune` refuses the null GPU, as it should; a rehearsal of this bench wants to see all its steps.
TUNE_REHEARSED = (
    "import sys; from blackwell import nullgpu; from blackwell.cli import main; "
    "nullgpu.is_on = lambda: False; nullgpu.driver_visible = lambda: True; sys.exit(main(sys.argv[1:]))"
)

LENGTHS = [
    "-m",
    "blackwell.warm.model",
    "qwen3.5-27b",
    "--layers",
    "2",
    "--drafter",
    "--tokens",
    "2048",
    "8192",
    "3001",
]
PROGRAMS: dict[str, list[str]] = {
    "toy": ["-m", "blackwell", "step", "--device", "cuda", "--json"],
    "toy-packed": ["-m", "blackwell", "step", "--device", "cuda", "--packed", "--json"],
    "qwen3.5-27b": ["-m", "blackwell.warm.model", "qwen3.5-27b", "--layers", "2", "--tokens", "4096", "--steps", "22"],
    "qwen3.5-27b-packed": [
        "-m",
        "blackwell.warm.model",
        "qwen3.5-27b",
        "--layers",
        "2",
        "--packed",
        "--tokens",
        "4096",
        "--steps",
        "22",
    ],
    # The workload's own two runs: every length and the drafter that an image for this model is warm for.
    "qwen3.5-27b-lengths": [*LENGTHS],
    "qwen3.5-27b-lengths-packed": [*LENGTHS, "--packed"],
}
DEFAULT_PROGRAMS = ("toy", "qwen3.5-27b")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of one program."""

    program: str
    run: str  # "cold", "warm", ...
    ok: bool
    process_seconds: float
    report: Mapping[str, Any] = field(default_factory=dict)  # what the program printed
    new_files: Mapping[str, int] = field(default_factory=dict)  # by kind
    error: str = ""

    @property
    def first_step(self) -> float | None:
        """Seconds of the first training step."""
        return self._time("first_step")

    @property
    def second_step(self) -> float | None:
        """Seconds of the second training step."""
        return self._time("second_step")

    @property
    def triton(self) -> float | None:
        """Seconds in Triton's compile(), which finds or compiles, and in loading its modules; added over threads."""
        value = self.report.get("triton_seconds", self.report.get("seconds", {}).get("triton"))
        return None if value is None else float(value)

    @property
    def dynamo(self) -> float | None:
        """Seconds in Dynamo's frames: tracing, guards, and finding or compiling the graph."""
        value = self.report.get("dynamo_seconds", self.report.get("seconds", {}).get("dynamo"))
        return None if value is None else float(value)

    @property
    def later_steps(self) -> float | None:
        """Median seconds of the steps after the second."""
        return self._time("later_steps")

    def _time(self, name: str) -> float | None:
        times = self.report.get("seconds") or next(iter(self.report.get("timings", [])), {})
        value = times.get(name)
        return None if value is None else float(value)


class Bench:
    """The phases, and what they share: directories, environment, the deadline."""

    def __init__(self, work: Path, wheels: Path | None, card: str | None, rehearse: bool, budget: float) -> None:
        self.work = work
        self.deadline = time.monotonic() + budget
        self.rehearse = rehearse
        self.rows: list[Row] = []
        self.notes: list[str] = []
        site = work / "site"
        site.mkdir(parents=True, exist_ok=True)
        for wheel in sorted(wheels.glob("*.whl")) if wheels else []:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        for program in site.glob("triton/backends/nvidia/bin/*"):
            program.chmod(0o755)  # zipfile drops the executable bit
        if any(site.iterdir()):  # or every process would compile transformers again, in its own time
            subprocess.run(
                [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)],
                capture_output=True,
                timeout=120,
                check=False,
            )
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("TRITON_", "TORCHINDUCTOR_", "BLACKWELL_", "NULLGPU_"))
            },
            "PYTHONPATH": os.pathsep.join([str(site), str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self._made("tmp")),
            "HOME": str(self._made("home")),
            "HF_HUB_OFFLINE": "1",
            "FLA_TILELANG": "0",
            "TRITON_CACHE_AUTOTUNING": "1",
            "ATEN_CPU_CAPABILITY": "avx2",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "BLACKWELL_STARTUP": "0",
            "BLACKWELL_NULLGPU_LIB": str(work / "nullgpu"),
            "BLACKWELL_CARDS": str(self._made("cards")),
        }
        self.facts = self._facts(card)
        # Below Blackwell, Inductor sets TRITON_PTXAS_PATH to torch's own assembler once it is imported, and one kernel then has two keys.
        self.environment["TRITON_PTXAS_PATH"] = self.facts["ptxas"]
        if self.facts["hopper_refusal"]:
            self.environment[HOPPER] = "1"
            self.notes.append(
                "FLA's refusal of the gated backward on Hopper (fla issue 640) is off in all runs: times are real, gradients may be wrong"
            )
        self.card = str(self.facts["card"])

    def _made(self, name: str) -> Path:
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _facts(self, card: str | None) -> dict[str, Any]:
        """Versions, the card, and its measured profile (written where the null GPU looks for profiles)."""
        code = """
import importlib.metadata as m, json, os, pathlib, platform, sys
import torch, triton
from packaging.version import Version
card, driver = sys.argv[1] or None, None
if not card:
    from blackwell import nullgpu
    profile = nullgpu.dump_profile(0)
    pathlib.Path(os.environ["BLACKWELL_CARDS"], "measured.toml").write_text(nullgpu.profile_toml(profile))
    card = profile["name"]
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
names = ("torch", "triton", "fla-core", "flash-linear-attention", "transformers", "causal-conv1d")
facts = {"card": card, "python": platform.python_version(), "cuda": torch.version.cuda, "versions": {n: version(n) for n in names}}
facts["triton_imported"] = triton.__version__
facts["site"] = str(pathlib.Path(torch.__file__).parents[1])
facts["ptxas"] = str(pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")
facts["hopper_refusal"] = ("H200" in card or "H100" in card) and Version(triton.__version__) < Version("3.7.1")
print(json.dumps(facts))
"""
        done = subprocess.run(
            [sys.executable, "-c", code, card or ""],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"first_step: no facts of this machine:\n{done.stderr[-3000:]}")
        facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        facts["date"] = time.strftime("%Y-%m-%d")
        facts["cores"] = len(os.sched_getaffinity(0))
        version_file = Path("/proc/driver/nvidia/version")
        facts["nvidia_driver"] = version_file.read_text().splitlines()[0] if version_file.exists() else None
        return facts

    @property
    def shown_facts(self) -> dict[str, Any]:
        """The facts without this machine's paths: results are kept in the repository."""
        return {name: value for name, value in self.facts.items() if name not in ("site", "ptxas")}

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    # ---- phases ----

    def build_null_gpu(self) -> None:
        """Build the stand-ins against the installed torch."""
        started = time.monotonic()
        command = [
            sys.executable,
            str(INSIDE / "nullgpu" / "build.py"),
            "--site",
            self.facts["site"],
            "--out",
            str(self.work / "nullgpu"),
        ]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            raise SystemExit(f"first_step: the null GPU does not build here:\n{done.stdout}{done.stderr[-3000:]}")
        self.say(f"null GPU built in {time.monotonic() - started:.0f} s")

    def warm(self, programs: Sequence[str], bundle: Path | None = None) -> None:
        """Fill one cache for each program, under the null GPU; the programs side by side. bundle: measured choices to prefer."""
        started = time.monotonic()
        running = {}
        environment = {
            **self.environment,
            "BLACKWELL_NULLGPU_BESIDE_DRIVER": "1",
            "BLACKWELL_ROOT": str(self._made("root")),
        }
        jobs = max(1, int(self.facts["cores"]) // len(programs))
        for name in programs:
            command = [
                sys.executable,
                "-m",
                "blackwell",
                "warm",
                "--cache",
                str(self.cache(name)),
                "--card",
                self.card,
                "--no-check",
                "--json",
            ]
            command += ["--bundle", str(bundle)] if bundle else []
            command += ["--jobs", str(jobs), "--timeout", f"{max(30.0, self.left()):.0f}", "--", *self.program(name)]
            log = (self.work / f"{name}.warm.log").open("w")
            running[name] = (
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True),
                log,
            )
        for name, (process, log) in running.items():
            try:
                answer, _ = process.communicate(timeout=max(30.0, self.left()))
            except subprocess.TimeoutExpired:
                process.terminate()
                answer, _ = process.communicate()
            log.close()
            text = (self.work / f"{name}.warm.log").read_text()
            seconds = time.monotonic() - started
            report = json.loads(answer) if process.returncode == 0 else {}
            self.add(Row(program=name, run="fill with bundle" if bundle else "fill (null GPU)", ok=process.returncode == 0, process_seconds=seconds, report=report, error="" if process.returncode == 0 else text[-3000:]))  # fmt: skip

    def on_card(self, name: str, run: str, cache: Path, *, compiler: bool, profile: Path | None = None) -> Row:
        """The program on the card, in a fresh process, with this cache. profile: where Python's profiler writes."""
        environment = {
            **self.environment,
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            # As in an image, but for the overlay: what a run writes shall be seen in the cache itself.
            "BLACKWELL_CACHE": str(cache),
            "BLACKWELL_STARTUP": "1",
            "BLACKWELL_OVERLAY": "off",
        }
        for part in ("triton", "inductor"):
            (cache / part).mkdir(parents=True, exist_ok=True)
        if self.rehearse:
            environment |= self._null_environment()
        if profile:
            environment[PROFILE] = str(profile)
        if not compiler:
            environment["PATH"] = str(self._without_compiler())
        before = files(cache)
        started = time.monotonic()
        try:
            done = subprocess.run(
                self.program(name),
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(20.0, self.left()),
                check=False,
            )
            code, out, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, out, errors = -1, "", f"no end before the bench's own deadline\n{_text(late.stderr)}"
        seconds = time.monotonic() - started
        report: dict[str, Any] = {}
        if "{" in out:
            try:
                report, _ = json.JSONDecoder().raw_decode(out[out.index("{") :])
            except json.JSONDecodeError:
                errors += "\n(no JSON on stdout)"
        ok = code == 0 and bool(report)
        row = Row(
            program=name, run=run, ok=ok, process_seconds=seconds, report=report, new_files=kinds(files(cache) - before),
            error="" if ok else f"exit code {code}\n{out[-500:]}\n{errors[-2500:]}",
        )  # fmt: skip
        self.add(row)
        return row

    def _without_compiler(self) -> Path:
        """A PATH without a C compiler. `file` stays: Triton's keys for its C modules hold what it says of the interpreter
        (platform.architecture()), so that a machine with and one without it don't share them.
        """
        directory = self._made("no-compiler")
        if (found := shutil.which("file")) and not (directory / "file").exists():
            (directory / "file").symlink_to(found)
        return directory

    def _null_environment(self) -> dict[str, str]:
        code = "import json, sys; from blackwell import nullgpu; print(json.dumps(nullgpu.environment(sys.argv[1], beside_driver=True)))"
        done = subprocess.run(
            [sys.executable, "-c", code, self.card],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return dict(json.loads(done.stdout))

    def cache(self, name: str) -> Path:
        """Where the program's warmed caches lie; a card run uses the same path, for group files hold absolute ones."""
        return self.work / "caches" / name

    def program(self, name: str) -> list[str]:
        """The program behind this file's `--entry`, the same words for every run of it."""
        return [sys.executable, str(Path(__file__).resolve()), "--entry", *PROGRAMS[name]]

    def measure(self, name: str, *, tune: bool, profile: Path | None) -> list[dict[str, Any]]:
        """Cold, warm, warm without autotune results, and warm with measured ones. Returns the autotuners' table."""
        cache = self.cache(name)
        self.on_card(name, "warm", cache, compiler=False)
        if profile:
            self.on_card(name, "profiled", cache, compiler=False, profile=profile)
        self.on_card(name, "cold", self.work / "cold" / name, compiler=True)
        static = results(cache)
        if tune and (bundle := self.tune(name)):
            self.warm([name], bundle)
            self.on_card(name, "warm, bundle of blackwell tune", cache, compiler=False)
        forget_results(cache)
        self.on_card(name, "warm, no autotune results", cache, compiler=False)
        if not tune:
            self.on_card(name, "warm, measured choices", cache, compiler=False)
        return regrets(cache, static)

    def count(self, programs: Sequence[str]) -> None:
        """Hits and misses of these programs, all at once on the card, with and without autotune results: their times mean nothing."""

        def both(name: str) -> None:
            self.on_card(name, "warm, counted", self.cache(name), compiler=False)
            forget_results(self.cache(name))
            self.on_card(name, "warm, no autotune results, counted", self.cache(name), compiler=False)

        with ThreadPoolExecutor(max(1, len(programs))) as pool:
            list(pool.map(both, programs))

    def tune(self, name: str) -> Path | None:
        """`blackwell tune` of the program on the card, from its warm cache -> the bundle, or None when that failed."""
        cache, bundle = self.cache(name), self.work / f"{name}.bundle.json"
        environment = {
            **self.environment,
            "BLACKWELL_CACHE": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "PATH": str(self._without_compiler()),
        }
        command = [sys.executable, "-m", "blackwell", "tune", "--json", "--out", str(bundle), "--", *self.program(name)]
        if self.rehearse:
            environment |= self._null_environment()
            command[1:3] = ["-c", TUNE_REHEARSED]
        before, started = files(cache), time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(20.0, self.left()), check=False)  # fmt: skip
        ok = done.returncode == 0
        report = json.loads(done.stdout) if ok else {}
        self.say(done.stderr[-1500:])
        self.add(Row(program=name, run="blackwell tune", ok=ok, process_seconds=time.monotonic() - started, report=report, new_files=kinds(files(cache) - before), error="" if ok else done.stderr[-3000:]))  # fmt: skip
        return bundle if ok else None

    def add(self, row: Row) -> None:
        """Keep a row, and show it at once: the bench may not live to its end."""
        self.rows.append(row)
        self.say(" | ".join(str(cell) for cell in cells(row)) + (f"\n{row.error}" if row.error else ""))

    @staticmethod
    def say(text: str) -> None:
        """Progress on stderr."""
        print(text, file=sys.stderr, flush=True)


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def files(cache: Path) -> set[Path]:
    """Every file below the cache."""
    return {path for path in cache.rglob("*") if path.is_file()}


def kinds(paths: set[Path]) -> dict[str, int]:
    """How many files of each kind; locks don't count."""
    found: dict[str, int] = {}
    for path in paths:
        kind = "autotune.json" if path.name.endswith(".autotune.json") else path.suffix.lstrip(".") or "other"
        if kind != "lock":
            found[kind] = found.get(kind, 0) + 1
    return found


def results(cache: Path) -> dict[Path, Any]:
    """Triton's autotune results in the cache."""
    return {path: json.loads(path.read_text()) for path in sorted(cache.glob("triton/*/*.autotune.json"))}


def forget_results(cache: Path) -> None:
    """Delete every autotune result, Triton's and Inductor's."""
    for path in [*results(cache), *cache.glob("inductor/**/*.best_config")]:
        path.unlink()


def config_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as Triton stores it in `*.autotune.json`, flat and without what is not set."""
    flat = {**entry["kwargs"], **{key: value for key, value in entry.items() if key not in ("kwargs", "pre_hook")}}
    return {key: value for key, value in flat.items() if value is not None}


def regrets(cache: Path, static: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each autotuned kernel and key: the static choice's measured time against the best one's. Times in ms."""
    report = cache / "report.json"
    known = json.loads(report.read_text())["choices"] if report.exists() else []
    table = []
    for path, guess in static.items():
        if not path.exists():
            continue
        measured = [(config_of(config), times[0]) for config, times in json.loads(path.read_text())["configs_timings"]]
        scores = [(config_of(config), score) for config, score in guess["configs_timings"]]
        chosen = min(scores, key=lambda pair: list(pair[1]))[0]
        best, best_ms = min(measured, key=lambda pair: pair[1])
        mine = next((ms for config, ms in measured if config == chosen), None)
        kernel = path.name.removesuffix(".autotune.json")
        key = [str(part) for part in guess["key"]]
        tried = next((entry["configs"] for entry in known if entry["kernel"] == kernel and entry["key"] == key), [])
        configs = []
        for config, ms in measured:
            facts = next((entry for entry in tried if entry["config"] == config), {})
            configs.append(
                {
                    "ms": ms,
                    **{name: facts.get(name) for name in ("config", "registers", "spills", "shared", "warps", "score")},
                    "config": config,
                }
            )
        table.append(
            {
                "kernel": kernel, "key": key, "configs": configs, "static": chosen, "static_ms": mine, "best": best, "best_ms": best_ms,
                "regret": None if mine is None or not best_ms else mine / best_ms - 1,
            }
        )  # fmt: skip
    return table


HEADER = (
    "program",
    "run",
    "first step s",
    "second step s",
    "Triton s",
    "Dynamo s",
    "later steps ms",
    "process s",
    "loaded",
    "compiled",
    "FX hit/miss",
    "autograd hit/miss",
    "new files",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row for people."""

    def number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    graphs = row.report.get("graphs", {})
    new = ", ".join(f"{count} {kind}" for kind, count in sorted(row.new_files.items())) or "0"
    return (
        row.program, row.run if row.ok else f"{row.run} FAILED", number(row.first_step), number(row.second_step, digits=3),
        number(row.triton), number(row.dynamo),
        number(row.later_steps, 1000.0), number(row.process_seconds, digits=1), str(row.report.get("kernels_loaded", "-")),
        str(row.report.get("misses", "-")), f"{graphs.get('fx_hit', '-')}/{graphs.get('fx_miss', '-')}",
        f"{graphs.get('autograd_hit', '-')}/{graphs.get('autograd_miss', '-')}", new,
    )  # fmt: skip


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(
        [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]
    )


def result(bench: Bench, tuned: Mapping[str, list[dict[str, Any]]]) -> str:
    """All tables."""
    lines = [
        f"# First step on {bench.card}",
        "",
        json.dumps(bench.shown_facts),
        *bench.notes,
        "",
        table(HEADER, [cells(row) for row in bench.rows]),
        "",
    ]
    for name, kernels in tuned.items():
        shown = [
            (entry["kernel"], str(len(entry["configs"])), f"{entry['static_ms']:.4f}" if entry["static_ms"] is not None else "-",
             f"{entry['best_ms']:.4f}", f"{entry['regret']:+.0%}" if entry["regret"] is not None else "-", json.dumps(entry["static"]), json.dumps(entry["best"]))
            for entry in kernels
        ]  # fmt: skip
        lines += [
            f"## Static choice against measured, {name}",
            "",
            table(("kernel", "configs", "static ms", "best ms", "regret", "static", "best"), shown),
            "",
        ]
        times = {row.run: row.later_steps for row in bench.rows if row.program == name and row.ok}
        guess, best = (
            times.get("warm"),
            times.get("warm, measured choices", times.get("warm, bundle of blackwell tune")),
        )
        if guess and best:
            lines.append(
                f"Whole step: {guess * 1000:.2f} ms with static choices, {best * 1000:.2f} ms with measured ones: {guess / best - 1:+.1%}.\n"
            )
        first = {row.run: row.first_step for row in bench.rows if row.program == name and row.ok}
        if first.get("cold") and first.get("warm"):
            lines.append(
                f"First step: {first['cold']:.2f} s cold, {first['warm']:.2f} s warm: {first['cold'] / first['warm']:.0f} times faster.\n"
            )
        part = {row.run: row.triton for row in bench.rows if row.program == name and row.ok}
        if part.get("cold") and part.get("warm"):
            lines.append(
                f"Triton's part of it: {part['cold']:.2f} s cold, {part['warm']:.3f} s warm: {part['cold'] / part['warm']:.0f} times faster.\n"
            )
    return "\n".join(lines)


def profiled(path: str) -> None:
    """Profile this process from now on; the programs leave by os._exit, so the table is written there."""
    import cProfile
    import pstats

    profiler, leave = cProfile.Profile(), os._exit

    def write_and_leave(code: int) -> None:
        profiler.disable()
        with Path(path).open("w") as out:
            for order in ("tottime", "cumulative"):
                pstats.Stats(profiler, stream=out).sort_stats(order).print_stats(70)
        leave(code)

    os._exit = write_and_leave  # type: ignore[assignment]
    profiler.enable()


def entry(argv: list[str]) -> None:
    """Run `-m MODULE ARGS` in this process, as Python would; with FLA's refusal on Hopper off where the bench says so."""
    import runpy

    import blackwell.startup  # noqa: F401 - what the image's interpreter does at its start; BLACKWELL_STARTUP=0: nothing

    if os.environ.get(HOPPER) == "1":
        # https://github.com/fla-org/flash-linear-attention/issues/640: for counting hits only, never for training. Remove with Triton 3.6.
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.IS_NVIDIA_HOPPER = False
    assert argv[0] == "-m", argv
    sys.argv = argv[1:]
    if path := os.environ.get(PROFILE):
        profiled(path)
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


def main() -> int:
    """Run the bench; exit code 1 when a warm run failed or compiled anything."""
    if sys.argv[1:2] == ["--entry"]:
        entry(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", ".")),
        metavar="DIR",
        help="where first_step.json goes (default: $OUT or .)",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels to use beside what is installed")
    parser.add_argument(
        "--card", metavar="NAME", help="a card's profile by name (default: the card in this machine, measured)"
    )
    parser.add_argument(
        "--program",
        action="append",
        choices=sorted(PROGRAMS),
        help=f"repeatable (default: {', '.join(DEFAULT_PROGRAMS)})",
    )
    parser.add_argument(
        "--count",
        action="append",
        default=[],
        choices=sorted(PROGRAMS),
        help="a program of which only hits and misses matter: run at once with the others of its kind; repeatable",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measured choices by `blackwell tune` and `blackwell warm --bundle`, instead of what the run before left",
    )
    parser.add_argument(
        "--profile", action="store_true", help="one more warm run of each program under Python's profiler, in DIR"
    )
    parser.add_argument(
        "--budget", type=float, default=460.0, metavar="S", help="seconds for everything (default: 460)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run the card's part under the null GPU; times mean nothing"
    )
    args = parser.parse_args()
    programs = args.program or ([] if args.count else list(DEFAULT_PROGRAMS))
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first-step-", ignore_cleanup_errors=True) as temporary:
        bench = Bench(Path(temporary), args.wheels, args.card, args.rehearse, args.budget)
        tuned: dict[str, list[dict[str, Any]]] = {}
        try:
            bench.build_null_gpu()
            bench.warm([*programs, *args.count])
            if not all(row.ok for row in bench.rows):
                return 1  # nothing is warm, so there is nothing to measure
            for name in programs:
                profile = args.out.resolve() / f"profile-{name}.txt" if args.profile else None
                tuned[name] = bench.measure(name, tune=args.tune, profile=profile)
            bench.count(args.count)
        finally:
            text = result(bench, tuned)
            print(text, flush=True)
            content = {
                "facts": bench.shown_facts,
                "notes": bench.notes,
                "rows": [asdict(row) for row in bench.rows],
                "autotuners": tuned,
            }
            (args.out / "first_step.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
            (args.out / "first_step.md").write_text(text)
            for log in Path(temporary).glob("*.warm.log"):
                shutil.copy(log, args.out)
        warm = [row for row in bench.rows if row.run.startswith("warm")]
        expected = 3 * len(programs) + 2 * len(args.count)
        return 0 if len(warm) == expected and all(row.ok and row.report.get("misses") == 0 for row in warm) else 1


if __name__ == "__main__":
    sys.exit(main())
