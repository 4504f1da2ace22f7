"""Runs inside every process that `blackwell warm` watches: writes down what Triton and Inductor compile and choose, and makes the
autotuners choose statically instead of timing kernels that do nothing. The watched script is not changed and does not notice.

Set up by environment variables (`blackwell.warm.child` sets them); each process appends JSON lines to its own file.
"""

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from blackwell.after_import import AfterImport
from blackwell.warm import choice

EVENTS = "BLACKWELL_WARM_EVENTS"
"""Directory for the event files; the recorder is on when this is set."""

LIMITS = "BLACKWELL_WARM_LIMITS"
"""JSON of `choice.Limits`. Set: autotuners choose statically. Not set: they are left alone (check runs, real cards)."""

THREADS = "BLACKWELL_WARM_THREADS"
"""Compile an autotuner's configurations in this many threads."""


class Recorder:
    """Event writer and the patches that feed it; one per process."""

    def __init__(self, directory: Path, limits: choice.Limits | None, threads: int) -> None:
        self.limits = limits
        self.threads = threads
        self._directory = directory
        self._lock = threading.Lock()
        self._failed = False
        self._ended = False
        self._thread = threading.local()  # of the autotuner's call in this thread: directory, asked, pruned

    def write(self, event: str, **content: Any) -> None:
        """Append one event. A forked child writes to a file of its own."""
        line = json.dumps({"event": event, **content}, default=str) + "\n"
        with self._lock, (self._directory / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line)

    # ---- Triton ----

    def watch_triton(self, _: ModuleType) -> None:
        """Called once `triton` is imported."""
        from triton import knobs
        from triton.runtime import autotuner
        from triton.runtime.autotuner import Autotuner

        before = knobs.compilation.listener

        def listener(**event: Any) -> None:
            self.on_compilation(**event)
            if before is not None:
                before(**event)

        knobs.compilation.listener = listener
        if self.limits is not None:
            _replace(Autotuner, "run", lambda original: self.run_and_compile(original))
            _replace(Autotuner, "_bench", lambda original: self.static_bench)
            _replace(Autotuner, "prune_configs", lambda original: self.prune_and_compile(original))
            _replace(Autotuner, "check_disk_cache", lambda original: self.note_choice(original))
            _replace(autotuner, "get_cache_manager", lambda original: self.note_directory(original))

    def on_compilation(self, *, src: Any, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's listener: one event for each kernel asked for."""
        target = metadata.get("target")
        self._thread.asked = True
        facts: dict[str, Any] = {
            "hash": metadata.get("hash"),
            "kernel": metadata.get("name") or getattr(src, "name", "?"),
            "hit": cache_hit,
            "arch": getattr(target, "arch", None),
        }
        if not cache_hit:
            facts["seconds"] = round(times.total / 1e6, 4)
            facts["specialization"] = specialization(src)
        self.write("kernel", **facts)

    def static_bench(self, tuner: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        """Stands for `Autotuner._bench`: compiles and loads the configuration as that does, and answers a static score for its times."""
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources, PTXASError

        current = {**meta, **config.all_kwargs()}
        arguments = {**tuner.nargs, **current}
        record = self._choice_of(tuner)
        order = len(record)
        try:
            if config.pre_hook:
                config.pre_hook(arguments)
            tuner.pre_hook(arguments)
            kernel = tuner.fn.run(*args, **current)
            tuner.post_hook(arguments, exception=None)
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError) as error:
            tuner.post_hook(arguments, exception=error)
            record.append({"config": _config_dict(config), "rejected": f"{type(error).__name__}: {error}"[:500]})
            return [choice.REJECTED] * 3
        facts = choice.KernelFacts(
            registers=kernel.n_regs,
            spills=kernel.n_spills,
            shared=kernel.metadata.shared,
            warps=kernel.metadata.num_warps,
        )
        assert self.limits is not None
        value = choice.score(facts, self.limits, order)
        record.append({"config": _config_dict(config), "hash": kernel.hash, **vars(facts), "score": value})
        return value

    def run_and_compile(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Autotuner.run`: compiles every configuration for each new specialization of the kernel's arguments.

        An autotuner tunes once for a key, and the key says less than a specialization does (not the divisibility of an argument, not
        whether a pointer is None). The later ones would be compiled for the choice made here alone, and a card that tunes anew and
        chooses otherwise would have to compile.
        """

        def ran(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._thread.asked = self._thread.pruned = False
            result = run(tuner, *args, **kwargs)
            if self._thread.asked and not self._thread.pruned and len(tuner.configs) > 1:
                tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
                try:
                    tuner.prune_configs(kwargs)
                finally:
                    tuner.nargs = None
            return result

        return ran

    def prune_and_compile(self, prune: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Autotuner.prune_configs`: compiles what is left in several threads before it is looked at one by one."""

        def pruned(tuner: Any, kwargs: dict[str, Any]) -> Any:
            self._thread.pruned = True
            configs = prune(tuner, kwargs)
            tuner.__dict__.setdefault("_blackwell_choice", {})[threading.get_ident()] = []
            if len(configs) > 1 and kwargs.get("grid") is not None:
                self._compile_all(tuner, configs, kwargs)
            return configs

        return pruned

    def _compile_all(self, tuner: Any, configs: Sequence[Any], kwargs: dict[str, Any]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from triton.runtime._async_compile import AsyncCompileMode, active_mode

        if active_mode.get() is not None:
            return
        args = [tuner.nargs[name] for name in tuner.arg_names if name in tuner.nargs]
        with ThreadPoolExecutor(self.threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                tuner.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})

    def note_choice(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Autotuner.check_disk_cache`: reports what was chosen, from which configurations."""

        def checked(tuner: Any, key: Any, configs: Any, bench: Callable[[], None]) -> Any:
            from triton.runtime.driver import driver

            self._thread.directory = None

            def bench_and_weigh() -> None:
                bench()
                self._weigh(tuner, key)

            found = check(tuner, key, configs, bench_and_weigh)
            if not found:
                chosen = tuner.cache[key]
                kept = bool(key) and not any(config.pre_hook for config in configs)  # what check_disk_cache writes
                self.write(
                    "choice", kernel=tuner.base_fn.__name__, key=[str(part) for part in key], chosen=_config_dict(chosen),
                    configs=list(self._choice_of(tuner)), how="static", kept=kept,
                    directory=self._thread.directory, arch=driver.active.get_current_target().arch,
                )  # fmt: skip
            return found

        return checked

    def _weigh(self, tuner: Any, key: Any) -> None:
        """Score the configurations against each other, once all are known, and choose again."""
        record = self._choice_of(tuner)
        if self.limits is None or len(record) != len(tuner.configs_timings):  # a list that names a configuration twice
            return
        names = choice.KernelFacts.__dataclass_fields__
        facts = [
            None if "rejected" in one else choice.KernelFacts(**{name: one[name] for name in names}) for one in record
        ]
        scores = choice.scores(facts, [_group(one["config"]) for one in record], self.limits)
        for one, value in zip(record, scores, strict=True):
            if "rejected" not in one:
                one["score"] = value
        tuner.configs_timings = dict(zip(tuner.configs_timings, scores, strict=True))
        tuner.cache[key] = min(tuner.configs_timings, key=tuner.configs_timings.get)

    def note_directory(self, get_cache_manager: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wraps the autotuner's `get_cache_manager`: remembers which directory this thread's result goes to."""

        def noting(key: str) -> Any:
            manager = get_cache_manager(key)
            directory = getattr(manager, "cache_dir", None)
            self._thread.directory = Path(directory).name if directory else None
            return manager

        return noting

    def _choice_of(self, tuner: Any) -> list[dict[str, Any]]:
        records: dict[int, list[dict[str, Any]]] = tuner.__dict__.setdefault("_blackwell_choice", {})
        return records.setdefault(threading.get_ident(), [])

    # ---- Inductor ----

    def watch_inductor(self, module: ModuleType) -> None:
        """Called once `torch._inductor.runtime.triton_heuristics` is imported."""
        if self.limits is not None:
            _replace(module.CachingAutotuner, "bench", lambda original: self.inductor_bench)
            _replace(module.CachingAutotuner, "benchmark_all_configs", self.note_inductor_choice)

    def note_inductor_choice(self, benchmark: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `CachingAutotuner.benchmark_all_configs`: reports the choice that becomes a `*.best_config`."""

        def benchmarked(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            scores = benchmark(tuner, *args, **kwargs)
            tried = [
                {"config": _config_dict(launcher.config), **vars(_facts_of(launcher)), "score": score}
                for launcher, score in scores.items()
            ]
            self.write(
                "choice", kernel=str(tuner.inductor_meta.get("kernel_name", "?")), key=[Path(tuner.filename or "?").stem],
                chosen=_config_dict(min(scores, key=scores.get).config), configs=tried, how="static", kept=True, directory=None,
                arch=tuner.device_props.cc,
            )  # fmt: skip
            return scores

        return benchmarked

    def inductor_bench(self, tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands for `CachingAutotuner.bench`: a static score in place of a time. Scores compare like the lists of Triton's autotuner."""
        assert self.limits is not None
        all_of_them = list(tuner.launchers) if launcher in tuner.launchers else [launcher]
        scores = choice.scores(
            [_facts_of(one) for one in all_of_them],
            [_group(_config_dict(one.config)) for one in all_of_them],
            self.limits,
        )
        first, second, third = scores[all_of_them.index(launcher)]
        return first * 1e6 + second * 1e4 + third  # one float: Inductor logs and compares it as milliseconds

    def forbid_autotuning_templates(self, module: ModuleType) -> None:
        """Called once `torch._inductor.select_algorithm` is imported: max-autotune would bake garbage timings into the FX graph cache."""

        def refuse(original: Any) -> Any:
            def benchmark(*_: Any, **__: Any) -> Any:
                self.write("refused", what="max-autotune")
                raise RuntimeError(
                    "blackwell warm: this program asks Inductor to time kernels (max-autotune) and there is no GPU that could; a choice made "
                    "here would be noise and stay in the cache. Warm it without max-autotune, or fill the cache on a real card."
                )

            return benchmark

        _replace(module.AlgorithmSelectorCache, "make_benchmark_fn", refuse)

    def no_padding(self, module: ModuleType) -> None:
        """Called once `pad_mm` is imported: whether padding a matrix pays is measured there too; without a GPU the answer is no."""

        def never(original: Any) -> Any:
            def should_pad(*_: Any, **__: Any) -> bool:
                self.write("padding", chosen=False)
                return False

            return should_pad

        for name in ("_should_pad_bench", "should_pad_bench"):
            if hasattr(module, name):
                _replace(module, name, never)

    # ---- end ----

    def end(self, failed: bool = False) -> None:
        """Write the closing event, once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.write("end", failed=failed or self._failed, graphs=graph_counters(), argv=sys.argv)


def start() -> None:
    """Begin recording in this process; called by the start-up hook."""
    directory = Path(os.environ[EVENTS])
    limits = choice.Limits(**json.loads(os.environ[LIMITS])) if os.environ.get(LIMITS) else None
    recorder = Recorder(directory, limits, int(os.environ.get(THREADS, "1")))
    hooks = {"triton": recorder.watch_triton, "torch._inductor.runtime.triton_heuristics": recorder.watch_inductor}
    if limits is not None:
        hooks["torch._inductor.select_algorithm"] = recorder.forbid_autotuning_templates
        hooks["torch._inductor.fx_passes.pad_mm"] = recorder.no_padding
    sys.meta_path.insert(0, AfterImport(hooks))
    _watch_the_end(recorder)


def _watch_the_end(recorder: Recorder) -> None:
    """Have `end` called when the program is done, however it ends, short of a signal."""
    atexit.register(recorder.end)
    show, leave = sys.excepthook, os._exit

    def excepthook(*error: Any) -> None:
        recorder._failed = True
        show(*error)

    def _exit(code: int) -> None:
        recorder.end(failed=code != 0)
        leave(code)

    sys.excepthook = excepthook
    os._exit = _exit  # type: ignore[assignment]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the original's place; a bound method of the recorder becomes a method of the owner's objects."""
    made = make(getattr(owner, name))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    setattr(owner, name, replacement)


def _facts_of(launcher: Any) -> choice.KernelFacts:
    """What Inductor's launcher of one configuration knows of its kernel."""
    return choice.KernelFacts(
        registers=launcher.n_regs or 0,
        spills=launcher.n_spills or 0,
        shared=launcher.shared or 0,
        warps=launcher.config.num_warps,
    )


def _config_dict(config: Any) -> dict[str, Any]:
    """A `triton.Config` as plain data: what tells it from the others."""
    plain = {key: value for key, value in config.all_kwargs().items() if value is not None}
    return {key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in plain.items()}


def _group(config: Mapping[str, Any]) -> str:
    """Equal for configurations that differ in their number of warps alone."""
    return repr(sorted((name, value) for name, value in config.items() if name != "num_warps"))


def specialization(src: Any) -> dict[str, Any]:
    """What this compilation of a kernel is for: the types of its arguments, its constants, and the divisibility that was assumed."""
    fn = getattr(src, "fn", None)
    names = list(getattr(fn, "arg_names", []))

    def name_of(path: Any) -> str:
        index = path[0] if isinstance(path, tuple) else path
        return names[index] if isinstance(index, int) and index < len(names) else str(path)

    constants = {name_of(path): str(value) for path, value in dict(getattr(src, "constants", {}) or {}).items()}
    attributes = dict(getattr(src, "attrs", {}) or {})
    return {
        "signature": {str(key): str(value) for key, value in dict(getattr(src, "signature", {}) or {}).items()},
        "constants": constants,
        "divisible_by_16": sorted(name_of(path) for path, value in attributes.items() if value),
    }


def graph_counters() -> dict[str, int]:
    """Hits, misses and bypasses of the FX graph cache and the autograd cache in this process; empty when Dynamo was never used."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    return {
        f"{short}_{event}": utils.counters[group][f"{prefix}_{event}"]
        for short, group, prefix in (
            ("fx", "inductor", "fxgraph_cache"),
            ("autograd", "aot_autograd", "autograd_cache"),
        )
        for event in ("hit", "miss", "bypass")
    }
