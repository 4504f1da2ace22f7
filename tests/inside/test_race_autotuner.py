"""The autotuner's thread race, forced by barriers instead of hoped for.

Every scenario runs in a process of its own, with the fix in both its forms and, to prove that it can fail, without it.
The kernels are Python objects, so no GPU and no compiler is needed; `python test_race_autotuner.py MODE` runs them
all, MODE being fixed, descriptors or plain.
BLACKWELL_EXTRA_TRITONS names more directories with a Triton to try (colon-separated `uv pip install --target` trees).
"""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXTRA = [path for path in os.environ.get("BLACKWELL_EXTRA_TRITONS", "").split(":") if path]
TIMEOUT_S = 20.0


class Kernel:
    """Stands for a compiled kernel: keeps what it was launched with."""

    arg_names = ("x", "y")

    def __init__(self, action: Callable[..., None] | None = None) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.action = action

    @property
    def fn(self) -> Callable[..., None]:
        return _plain_function

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.launches.append(args)
        if self.action is not None:
            self.action(*args, **kwargs)


def _plain_function(x: object, y: object) -> None:
    """What Triton looks for behind the kernel."""


class Tensor:
    """As much of a tensor as the default hooks use."""

    def __init__(self, value: int) -> None:
        self.value = value

    def clone(self) -> "Tensor":
        return Tensor(self.value)

    def copy_(self, other: "Tensor") -> None:
        self.value = other.value


def make_tuner(
    kernel: Kernel, bench: Callable[[Callable[[], None]], None] | None = None, cls: Any = None, **kwargs: Any
) -> Any:
    """An autotuner with three configs, keyed by `x`; `bench` is called for each config in place of a timing loop."""
    from triton.runtime import autotuner

    def do_bench(call: Callable[[], None], quantiles: object) -> list[float]:
        if bench is None:
            call()
        else:
            bench(call)
        return [1.0, 1.0, 1.0]

    configs = [autotuner.Config({}, num_warps=n) for n in (1, 2, 4)]
    arguments: dict[str, Any] = {"reset_to_zero": None, "restore_value": None, "do_bench": do_bench, **kwargs}
    return (cls or autotuner.Autotuner)(kernel, list(Kernel.arg_names), configs, ["x"], **arguments)


def run_threads(*bodies: Callable[[], None]) -> None:
    """Run all at once; raise what the first failing one raised, or TimeoutError when one hangs."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a thread hangs")


def cold_warm(cls: Any = None) -> None:
    """One thread benchmarks; between two configs, another launches the tuned kernel."""
    inside, go_on = threading.Event(), threading.Event()

    def bench(call: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            assert go_on.wait(TIMEOUT_S)
        call()

    tuner = make_tuner(Kernel(), bench, cls)
    tuner.run("warm", 1)

    def warm() -> None:
        assert inside.wait(TIMEOUT_S)
        tuner.run("warm", 1)
        go_on.set()

    run_threads(lambda: tuner.run("cold", 2), warm)


def cold_warm_existing_object() -> None:
    """As `cold_warm` with an autotuner that was made, and had run, before the fix was armed (see `main`)."""
    inside, go_on = threading.Event(), threading.Event()
    tuner = EXISTING["tuner"]
    EXISTING["bench"] = lambda: (inside.set(), go_on.wait(TIMEOUT_S)) if not inside.is_set() else None

    def warm() -> None:
        assert inside.wait(TIMEOUT_S)
        tuner.run("warm", 1)
        go_on.set()

    run_threads(lambda: tuner.run("cold", 2), warm)


def cold_warm_subclass() -> None:
    """As `cold_warm` with a subclass that overrides `run` and reads `nargs` by itself, like FLA's."""
    from triton.runtime import autotuner

    class Own(autotuner.Autotuner):  # type: ignore[misc]
        def run(self, *args: Any, **kwargs: Any) -> Any:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            return super().run(*args, **kwargs)

    cold_warm(Own)


def cold_cold() -> None:
    """Both benchmark at once; one ends while the other is between two configs, and each sees its own arguments."""
    meet, first_done = threading.Barrier(2, timeout=TIMEOUT_S), threading.Event()
    seen: dict[str, list[Any]] = {}
    calls: dict[str, int] = {}

    def hook(nargs: dict[str, Any], reset_only: bool = False) -> None:
        seen.setdefault(threading.current_thread().name, []).append(nargs["x"])

    def bench(call: Callable[[], None]) -> None:
        name = threading.current_thread().name
        calls[name] = calls.get(name, 0) + 1
        if calls[name] == 1:
            meet.wait()
        if calls[name] == 2 and name == "slow":
            assert first_done.wait(TIMEOUT_S)
        call()

    tuner = make_tuner(Kernel(), bench, pre_hook=hook)

    def body(name: str) -> None:
        threading.current_thread().name = name
        tuner.run(name, 1)
        if name == "quick":
            first_done.set()

    run_threads(lambda: body("slow"), lambda: body("quick"))
    assert {name: set(values) for name, values in seen.items()} == {"slow": {"slow"}, "quick": {"quick"}}, seen
    assert set(tuner.cache) == {("slow",), ("quick",)}


def restored_values() -> None:
    """`restore_value` gives every thread its own tensor's value back, though both benchmark at once."""
    meet = threading.Barrier(2, timeout=TIMEOUT_S)
    tensors = {1: Tensor(1), 2: Tensor(2)}
    restored: dict[int, list[int]] = {1: [], 2: []}

    def launch(x: int, y: Tensor, **kwargs: Any) -> None:
        y.value += 1000
        meet.wait()  # both threads are between the copying and the restoring

    def bench(call: Callable[[], None]) -> None:
        meet.wait()
        call()
        key = int(threading.current_thread().name)
        restored[key].append(tensors[key].value)

    tuner = make_tuner(Kernel(launch), bench, restore_value=["y"])

    def body(key: int) -> None:
        threading.current_thread().name = str(key)
        tuner.run(key, tensors[key])

    run_threads(lambda: body(1), lambda: body(2))
    assert restored == {1: [1, 1, 1], 2: [2, 2, 2]}, restored


def recursion() -> None:
    """A hook launches the same kernel with other arguments while it is tuned; the outer call goes on with its own."""
    seen: list[Any] = []

    def hook(nargs: dict[str, Any], reset_only: bool = False) -> None:
        seen.append(nargs["x"])
        if nargs["x"] == "outer" and not reset_only:
            tuner.run("inner", 1)

    tuner = make_tuner(Kernel(), pre_hook=hook)
    tuner.run("outer", 1)
    assert set(tuner.cache) == {("outer",), ("inner",)}
    assert seen[-1] == "outer"


def crossed_nesting() -> None:
    """Thread 1 tunes A, whose hook launches B; thread 2 tunes B, whose hook launches A; nobody waits for ever."""
    meet = threading.Barrier(2, timeout=TIMEOUT_S)
    met: set[str] = set()
    tuners: dict[str, Any] = {}

    def hook_of(name: str, other: str) -> Callable[..., None]:
        def hook(nargs: dict[str, Any], reset_only: bool = False) -> None:
            if nargs["x"] == "outer" and name not in met:
                met.add(name)
                meet.wait()
                tuners[other].run("inner", 1)

        return hook

    tuners["a"] = make_tuner(Kernel(), pre_hook=hook_of("a", "b"))
    tuners["b"] = make_tuner(Kernel(), pre_hook=hook_of("b", "a"))
    run_threads(lambda: tuners["a"].run("outer", 1), lambda: tuners["b"].run("outer", 1))


def failing_launch() -> None:
    """A launch that raises leaves nothing behind for the next one."""

    def launch(x: object, y: object, **kwargs: Any) -> None:
        if y == "bad":
            raise RuntimeError("launch failed")

    tuner = make_tuner(Kernel(launch))
    for bad in (True, False):
        try:
            tuner.run("key", "bad" if bad else "good")
        except RuntimeError:
            assert bad
    assert tuner.fn.launches[-1] == ("key", "good")
    assert tuner.nargs is None


def copies() -> None:
    """An autotuner that has run can still be copied, deep-copied and pickled, and its copies work."""
    tuner = make_tuner(Kernel())
    tuner.run("key", 1)
    for twin in (copy.copy(tuner), copy.deepcopy(tuner)):
        twin.run("other", 1)
        assert twin.nargs is None
    store = tuner.__dict__.get("_blackwell_per_thread")
    assert pickle.loads(pickle.dumps(store)) is not store or store is None


def disk_timings() -> None:
    """What `cache_results` writes for a key are the timings of that key, though another thread tuned meanwhile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import autotuner

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 120, 32)

    triton.runtime.driver.set_active(Driver())
    kernel = triton.jit(_plain_function)
    kernel.run = lambda *args, **kwargs: None
    slow_benched, quick_done = threading.Event(), threading.Event()
    durations = {"slow": 7.0, "quick": 1.0}
    timings: dict[str, list[float]] = {}

    def do_bench(call: Callable[[], None], quantiles: object) -> list[float]:
        return [durations[threading.current_thread().name]] * 3

    class Memory:
        """Cache manager that keeps the text; "slow" pauses between its benchmark and its writing."""

        def get_file(self, name: str) -> None:
            return None

        def put(self, text: str, name: str, binary: bool) -> None:
            timings[threading.current_thread().name] = [t[0] for _, t in json.loads(text)["configs_timings"]]

    autotuner.get_cache_manager = lambda key: Memory()
    configs = [autotuner.Config({}, num_warps=n) for n in (1, 2)]

    def reset(nargs: dict[str, Any], reset_only: bool = False) -> None:
        """Runs after the benchmark, just before Triton stores the timings."""

    tuner = autotuner.Autotuner(
        kernel, ["x", "y"], configs, ["x"], None, None, pre_hook=reset, do_bench=do_bench, cache_results=True
    )
    check = tuner.check_disk_cache

    def paused(key: Any, pruned: Any, bench: Callable[[], None]) -> Any:
        def bench_then_pause() -> None:
            bench()
            if threading.current_thread().name == "slow":
                slow_benched.set()
                assert quick_done.wait(TIMEOUT_S)

        return check(key, pruned, bench_then_pause)

    tuner.check_disk_cache = paused

    def body(name: str) -> None:
        threading.current_thread().name = name
        if name == "quick":
            assert slow_benched.wait(TIMEOUT_S)
        tuner.run(name, 1)
        if name == "quick":
            quick_done.set()

    run_threads(lambda: body("slow"), lambda: body("quick"))
    assert timings == {"slow": [7.0, 7.0], "quick": [1.0, 1.0]}, timings
    assert set(tuner.configs_timings) == set(configs), "the latest timings stay readable from every thread"


SCENARIOS: dict[str, Callable[[], None]] = {
    function.__name__: function  # type: ignore[attr-defined]
    for function in (
        cold_warm,
        cold_warm_existing_object,
        cold_warm_subclass,
        cold_cold,
        restored_values,
        recursion,
        crossed_nesting,
        failing_launch,
        copies,
        disk_timings,
    )
}
FAILS_WITHOUT_FIX = {
    "cold_warm": "not a mapping",
    "cold_warm_existing_object": "not a mapping",
    "cold_warm_subclass": "not a mapping",
    "cold_cold": "not a mapping",
    "restored_values": "Error",
    "recursion": "not a mapping",
    "disk_timings": "AssertionError",
}
EXISTING: dict[str, Any] = {}


def run_one(scenario: str, mode: str) -> None:
    """Run one scenario in this process, in which Triton is loaded and nothing is armed."""
    import triton.runtime.autotuner
    from blackwell import autotuner_race

    if scenario == "cold_warm_existing_object":
        EXISTING["bench"] = lambda: None

        def bench(call: Callable[[], None]) -> None:
            EXISTING["bench"]()
            call()

        EXISTING["tuner"] = make_tuner(Kernel(), bench)
        EXISTING["tuner"].run("warm", 1)
    if mode == "descriptors":  # as on a Triton whose source isn't as expected
        autotuner_race._with_local_arguments = lambda run: None
    if mode != "plain":
        assert autotuner_race.arm()
        recompiled = hasattr(triton.runtime.autotuner.Autotuner.run, "__wrapped__")
        assert recompiled == (mode == "fixed"), "the fast variant no longer fits this Triton's source"
    SCENARIOS[scenario]()


def main(mode: str) -> None:
    """Run every scenario in a forked process and print {scenario: last lines of its traceback, or "ok"} as JSON."""
    import triton.runtime.autotuner  # noqa: F401

    results: dict[str, str] = {}
    for scenario in SCENARIOS:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            answer = "ok"
            try:
                run_one(scenario, mode)
            except BaseException:
                answer = traceback.format_exc()[-3000:]
            os.write(writer, answer.encode())
            os._exit(0)  # threads of a failed scenario may still wait
        os.close(writer)
        with os.fdopen(reader) as pipe:
            results[scenario] = pipe.read()
        os.waitpid(child, 0)
    print(json.dumps(results))


def fake_module(autotuner: type) -> Any:
    """A stand-in for `triton.runtime.autotuner` with another `Autotuner`."""

    class Module:
        Autotuner = autotuner

        @staticmethod
        def Config(kwargs: dict[str, Any], num_warps: int) -> object:
            return object()

    return Module


class LikeTriton39:
    """Shares `nargs` between threads, as Triton 3.6 to 3.9 do."""

    def __init__(self, *args: Any) -> None:
        self.cache: dict[Any, Any] = {}

    def run(self, *args: Any) -> None:
        self.nargs = dict(enumerate(args))
        _ = self.cache.get("any")
        self.nargs = None  # type: ignore[assignment]


class KeepsPerThread(threading.local, LikeTriton39):
    """Fixed as triton-lang/triton#11509 proposes."""


class PassesArguments(LikeTriton39):
    """Fixed as triton-lang/triton#11580 proposes."""

    def run(self, *args: Any) -> None:
        _ = self.cache.get("any")


@pytest.mark.parametrize(("cls", "shared"), [(LikeTriton39, True), (KeepsPerThread, False), (PassesArguments, False)])
def test_probe_tells_behaviour(cls: type, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from blackwell import autotuner_race

    module = fake_module(cls)
    assert autotuner_race.is_shared(module) is shared
    if not shared:
        monkeypatch.setitem(sys.modules, autotuner_race.MODULE, module)
        assert autotuner_race.arm() is False
        assert "nargs" not in vars(cls), "a fixed Triton is left alone"


@functools.cache
def results_of(mode: str, tree: str) -> dict[str, str]:
    import blackwell

    # Inside an image: its start-up hook would arm the fix, and its TRITON_CACHE_AUTOTUNING ask for a kernel with a source.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    path = [tree, str(Path(blackwell.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "BLACKWELL_STARTUP": "0"}
    command = [sys.executable, __file__, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.fixture(params=["", *EXTRA], ids=lambda path: Path(path).name or "installed")
def triton_tree(request: pytest.FixtureRequest) -> str:
    if not request.param:
        pytest.importorskip("triton")
    return str(request.param)


@pytest.mark.parametrize("mode", ["fixed", "descriptors"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_the_fix(scenario: str, mode: str, triton_tree: str) -> None:
    assert results_of(mode, triton_tree)[scenario] == "ok"


@pytest.mark.parametrize("scenario", FAILS_WITHOUT_FIX)
def test_scenario_fails_without_the_fix(scenario: str, triton_tree: str) -> None:
    answer = results_of("plain", triton_tree)[scenario]
    assert answer != "ok", "this Triton does not need the fix"
    assert FAILS_WITHOUT_FIX[scenario] in answer.splitlines()[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
