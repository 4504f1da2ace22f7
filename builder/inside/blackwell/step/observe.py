"""Watch a run: kernels loaded, cache hits and misses as Triton and Dynamo count them, and warnings that mean a slow path was taken."""

import logging
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from blackwell.step.config import ColdKernel

# Fragments of the warnings after which a step is correct and slow, which is a failure here.
SLOW_PATH = (
    "falling back",  # transformers, Triton
    "fast path is not available",  # transformers up to 4.x
    "roll back to cpu",  # FLA without a usable Triton
    "without torch.compile",  # flex_attention run eagerly
    "recompile_limit",  # Dynamo gave up (https://github.com/vllm-project/vllm/issues/27178)
    "cache_size_limit",  # the same, older name
)


def is_slow_path(message: str) -> bool:
    """Whether a warning says that a slower implementation is in use."""
    lowered = message.lower()
    return any(fragment in lowered for fragment in SLOW_PATH)


class _Collector(logging.Handler):
    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())


class Observer:
    """Context manager. Enter it before transformers and FLA are imported, to hear what they say while importing.

    hits, misses: names of Triton kernels in the order they were asked for. loads: kernels loaded by Triton's own launcher (Inductor's
    static launcher loads without asking Triton; those are in the `graphs` counters).
    """

    def __init__(self, expect_warm: bool = False) -> None:
        self.expect_warm = expect_warm
        self.hits: list[str] = []
        self.misses: list[str] = []
        self.loads = 0
        # In Triton's compile(), which finds or compiles, loading its modules, and its hash of its own files; added over threads.
        self.triton_seconds = 0.0
        self.warnings: list[str] = []
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._graphs_before: dict[str, int] = {}
        self._dynamo_before = 0.0

    def on_compilation(
        self, *, src: Any, metadata: dict[str, Any], cache_hit: bool, times: Any = None, **_: Any
    ) -> None:
        """Triton's listener. Raises ColdKernel at a miss when the cache must be warm."""
        name = str(metadata.get("name") or getattr(src, "name", "?"))
        with self._lock:
            (self.hits if cache_hit else self.misses).append(name)
            self.triton_seconds += times.total / 1e6 if times is not None else 0.0
        if self.expect_warm and not cache_hit:
            raise ColdKernel(cold_text(name))

    def on_load_start(self, *_: Any, **__: Any) -> None:
        """Triton's hook before a module is loaded."""
        self._thread.load_started = time.perf_counter()

    def on_load(self, *_: Any, **__: Any) -> None:
        """Triton's hook after a module was loaded."""
        now = time.perf_counter()
        with self._lock:
            self.loads += 1
            self.triton_seconds += now - getattr(self._thread, "load_started", now)

    def on_warning(self, message: str) -> None:
        """Keep each distinct warning once, in order."""
        with self._lock:
            if message not in self.warnings:
                self.warnings.append(message)

    def by_kernel(self) -> dict[str, dict[str, int]]:
        """Hits and misses of each Triton kernel; an autotuned kernel counts once per configuration asked for."""
        names = sorted({*self.hits, *self.misses})
        return {name: {"hits": self.hits.count(name), "misses": self.misses.count(name)} for name in names}

    def graphs(self) -> dict[str, int]:
        """Hits, misses and bypasses of Inductor's FX graph cache and the autograd cache since this observer was entered."""
        return {name: count - self._graphs_before.get(name, 0) for name, count in _graph_counters().items()}

    def dynamo_seconds(self) -> float:
        """Seconds in Dynamo's frames since this observer was entered: tracing, guards, and finding or compiling the graph."""
        return _dynamo_seconds() - self._dynamo_before

    def slow_paths(self, cpu: bool) -> list[str]:
        """Warnings that mean a slow path. On the CPU FLA's "roll back to CPU" at import is expected: the references run there."""
        return [w for w in self.warnings if is_slow_path(w) and not (cpu and "roll back to cpu" in w.lower())]

    def __enter__(self) -> "Observer":
        filters = warnings.catch_warnings()
        filters.__enter__()
        self._undo.append(lambda: filters.__exit__(None, None, None))
        for fragment in SLOW_PATH:  # heard however PYTHONWARNINGS is set, and not only the first time
            warnings.filterwarnings("always", message=f"(?is).*{re.escape(fragment)}")
        show = warnings.showwarning

        def showwarning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            self.on_warning(str(message))
            show(message, *args, **kwargs)

        warnings.showwarning = showwarning
        self._undo.append(lambda: setattr(warnings, "showwarning", show))
        collector = _Collector(self.on_warning)
        for logger in _top_loggers():
            logger.addHandler(collector)
            self._undo.append(lambda logger=logger: logger.removeHandler(collector))  # type: ignore[misc]
        self._watch_triton()
        self._graphs_before = _graph_counters()
        self._dynamo_before = _dynamo_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _time_hash_of_files(self, autotuner: Any) -> None:
        """The autotuner asks for the hash of Triton's own files before anything is compiled or found, outside of what the listener times."""
        original: Callable[[], str] | None = getattr(autotuner, "triton_key", None)
        if original is None:  # a later Triton may ask elsewhere
            return

        def timed() -> str:
            started = time.perf_counter()
            value = original()
            with self._lock:
                self.triton_seconds += time.perf_counter() - started
            return value

        autotuner.triton_key = timed
        self._undo.append(lambda: setattr(autotuner, "triton_key", original))

    def _watch_triton(self) -> None:
        from triton import knobs
        from triton.runtime import autotuner

        self._time_hash_of_files(autotuner)
        before = knobs.compilation.listener

        def listener(**event: Any) -> None:
            if before is not None:
                before(**event)
            self.on_compilation(**event)

        knobs.compilation.listener = listener
        self._undo.append(lambda: setattr(knobs.compilation, "listener", before))
        for chain, hook in (
            (knobs.runtime.kernel_load_start_hook, self.on_load_start),
            (knobs.runtime.kernel_load_end_hook, self.on_load),
        ):
            chain.add(hook)
            self._undo.append(lambda chain=chain, hook=hook: chain.remove(hook))  # type: ignore[misc]


def _top_loggers() -> list[logging.Logger]:
    """The root logger and every logger that does not pass its records on to it; transformers sets that up when it is imported."""
    import torch._dynamo  # noqa: F401 - sets up torch's loggers

    known = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    names = {logger.name for logger in known if not logger.propagate} | {"", "transformers"}
    return [logging.getLogger(name) for name in sorted(names)]


def cold_text(name: str) -> str:
    """The sentence for a first miss."""
    return (
        f"kernel {name} was not in the kernel cache and had to be compiled. The cache was warmed for another shape, card, Triton or torch, "
        "or lies elsewhere than TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR say: `blackwell kernels explain` says which part differs."
    )


def _dynamo_seconds() -> float:
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(compilation_time_metrics.get("_compile.compile_inner", [])))


def _graph_counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {
        f"{short}_{event}": counters[group][f"{prefix}_{event}"]
        for short, group, prefix in (
            ("fx", "inductor", "fxgraph_cache"),
            ("autograd", "aot_autograd", "autograd_cache"),
        )
        for event in ("hit", "miss", "bypass")
    }
