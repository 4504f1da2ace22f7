"""Makes Triton's autotuner safe for threads, where it is not.

`Autotuner.run` keeps the arguments of the call in `self.nargs`, one attribute for all threads, and sets it to None when
it ends. Two threads on one autotuned kernel (a training loop and the autograd thread will do; one cold and one warm
suffice) then crash with "'NoneType' object is not a mapping", or benchmark with the other thread's arguments. The same
goes for `restore_copies`, in which the default hooks keep tensors while a kernel with `restore_value` is benchmarked,
and for `configs_timings` between its benchmark and the `.autotune.json` it is written to.

The cure: these attributes become descriptors of the class that keep one value per thread. That covers autotuners made
before and after, and subclasses with a `run` of their own (FLA's `CachedAutotuner`). There is no lock, so hooks that
launch other autotuned kernels, or wait for another thread, can't deadlock. Descriptors cost 2 to 4 % of a warm launch
(bench/race_overhead.py), so `Autotuner.run` itself is compiled again from its own source with `nargs` as a local
variable, which costs nothing; where its source doesn't look as expected, the descriptors alone do the work.

https://github.com/triton-lang/triton/issues/11494 - every Triton from 3.6.0 to 3.9.0 is affected. Remove this module
when no Triton in the matrix is: `is_shared` asks the loaded class how it behaves, not for its version, and `arm` leaves
a class alone that doesn't share.
"""

import ast
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

MODULE = "triton.runtime.autotuner"
_STORE = "_blackwell_per_thread"


class _Store(threading.local):
    """What one thread knows of one autotuner. Copies and pickles of an autotuner start with an empty one."""

    def __reduce__(self) -> tuple[type["_Store"], tuple[()]]:
        return (_Store, ())


def _store(tuner: Any) -> _Store:
    """The autotuner's store, made on first use; `setdefault` keeps exactly one when two threads come first at once."""
    store: _Store = tuner.__dict__.setdefault(_STORE, _Store())
    return store


def _per_thread(name: str, missing: Callable[[], Any] | None = None) -> property:
    """A property that holds one value per object and thread.

    A thread that never set it sees what the object's dictionary held before arming, else `missing()`, else
    AttributeError.
    """

    def get(tuner: Any) -> Any:
        store = _store(tuner)
        if hasattr(store, name):
            return getattr(store, name)
        if name in tuner.__dict__:
            return tuner.__dict__[name]
        if missing is not None:
            return missing()
        raise AttributeError(f"{type(tuner).__name__!r} object has no attribute {name!r}")

    def put(tuner: Any, value: Any) -> None:
        setattr(_store(tuner), name, value)

    return property(get, put)


def _timings() -> property:
    """`configs_timings`: the latest of all threads, as ever, but a thread inside `check_disk_cache` sees its own."""

    def get(tuner: Any) -> Any:
        store = _store(tuner)
        if getattr(store, "writing", False) and hasattr(store, "configs_timings"):
            return store.configs_timings
        if "configs_timings" in tuner.__dict__:
            return tuner.__dict__["configs_timings"]
        raise AttributeError(f"{type(tuner).__name__!r} object has no attribute 'configs_timings'")

    def put(tuner: Any, value: Any) -> None:
        tuner.__dict__["configs_timings"] = value
        store = _store(tuner)
        if getattr(store, "writing", False):
            store.configs_timings = value

    return property(get, put)


def _keeping_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step of tuning that calls user code (hooks, pruning, benchmarker), so that a launch of the same kernel
    from there, which ends by setting `nargs` to None, leaves the outer call's arguments as they were.
    """

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = getattr(self, "nargs", None)
        try:
            return method(self, *args, **kwargs)
        finally:
            self.nargs = arguments

    wrapped.__wrapped__ = method  # type: ignore[attr-defined]
    wrapped.__name__ = method.__name__
    return wrapped


def _owning_timings(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `check_disk_cache`: what it writes are the timings that its own thread measured."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        store = _store(self)
        store.writing = True
        try:
            return method(self, *args, **kwargs)
        finally:
            store.writing = False
            store.__dict__.pop("configs_timings", None)

    wrapped.__wrapped__ = method  # type: ignore[attr-defined]
    wrapped.__name__ = method.__name__
    return wrapped


class _LocalArguments(ast.NodeTransformer):
    """Turns `self.nargs` into a local variable, and hands it to the methods called in the cold part of `run`."""

    def __init__(self) -> None:
        self.cold_parts = 0

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if _is_attribute_of_self(node, "nargs"):
            return ast.copy_location(ast.Name("nargs", node.ctx), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        test = node.test
        not_in = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn)
        if not_in and _is_attribute_of_self(test.comparators[0], "cache"):  # type: ignore[attr-defined]
            self.cold_parts += 1
            node.body.insert(0, ast.copy_location(ast.parse("self.nargs = nargs").body[0], node.body[0]))
            node.body.append(ast.copy_location(ast.parse("self.nargs = None").body[0], node.body[-1]))
        return node


def _is_attribute_of_self(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _with_local_arguments(run: Any) -> Any | None:
    """`run` compiled again with `nargs` local to the call; None when its source isn't there or isn't as expected:
    one cold part (`if key not in self.cache`), no other `nargs`, and no assignment to it in an inner function.
    """
    if not isinstance(run, FunctionType) or run.__closure__ or hasattr(run, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(run)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    for node in ast.walk(function):
        taken = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
        inner_store = (
            node is not function
            and isinstance(node, (ast.FunctionDef, ast.Lambda))
            and any(
                _is_attribute_of_self(n, "nargs") and isinstance(n.ctx, ast.Store)  # type: ignore[attr-defined]
                for n in ast.walk(node)
            )
        )
        if taken == "nargs" or inner_store:
            return None
    transformer = _LocalArguments()
    transformer.visit(function)
    if transformer.cold_parts != 1:
        return None
    ast.fix_missing_locations(ast.increment_lineno(tree, run.__code__.co_firstlineno - 1))
    namespace: dict[str, Any] = {}
    exec(compile(tree, run.__code__.co_filename, "exec"), run.__globals__, namespace)
    made = namespace[function.name]
    made.__qualname__, made.__module__ = run.__qualname__, run.__module__
    made.__wrapped__ = run
    return made


def is_shared(module: Any) -> bool:
    """Whether a launch in one thread disturbs the call arguments that another thread sees, tried on a throw-away
    autotuner whose kernel is a Python object; needs no GPU, compiles nothing and takes well below a millisecond.
    """

    class Kernel:
        arg_names = ("x",)

        def fn(self) -> None: ...

        def run(self, *args: Any, **kwargs: Any) -> None: ...

    class Warm(dict[Any, Any]):
        """Claims to have tuned every key already."""

        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: object) -> Any:
            return configs[0]

    kernel: Any = Kernel()
    kernel.fn = lambda x: None  # Triton looks for a plain function behind the kernel
    configs = [module.Config({}, num_warps=1), module.Config({}, num_warps=2)]
    tuner = module.Autotuner(kernel, list(Kernel.arg_names), configs, ["x"], None, None)
    tuner.cache = Warm()
    mine = {"x": 1}
    tuner.nargs = mine
    other = threading.Thread(target=tuner.run, args=(2,), daemon=True)
    other.start()
    other.join()
    return getattr(tuner, "nargs", None) is not mine


def arm() -> bool:
    """Make the loaded Triton's `Autotuner` thread-safe; returns whether it is armed now.

    False when Triton isn't loaded or doesn't need it. Calling it again changes nothing.
    """
    module = sys.modules.get(MODULE)
    if module is None:
        return False
    autotuner: Any = module.__dict__["Autotuner"]
    if is_armed():
        return True
    if not is_shared(module):
        return False
    changes: dict[str, Any] = {
        "nargs": _per_thread("nargs"),
        "restore_copies": _per_thread("restore_copies", dict),
        "configs_timings": _timings(),
        "_bench": _keeping_arguments(autotuner._bench),
        "prune_configs": _keeping_arguments(autotuner.prune_configs),
    }
    if hasattr(autotuner, "check_disk_cache"):
        changes["check_disk_cache"] = _owning_timings(autotuner.check_disk_cache)
    local_run = _with_local_arguments(autotuner.run)
    if local_run is not None:
        changes["run"] = local_run
    for name, value in changes.items():
        setattr(autotuner, name, value)
    return True


def is_armed() -> bool:
    """Whether `arm` changed the loaded Triton (`blackwell doctor` shows it)."""
    module = sys.modules.get(MODULE)
    return module is not None and isinstance(module.__dict__["Autotuner"].__dict__.get("nargs"), property)


def disarm() -> None:
    """Give the class back as Triton made it; for measuring what arming costs. Not for use while kernels run."""
    if not is_armed():
        return
    autotuner: Any = sys.modules[MODULE].__dict__["Autotuner"]
    for name in ("nargs", "restore_copies", "configs_timings"):
        delattr(autotuner, name)
    for name in ("run", "_bench", "prune_configs", "check_disk_cache"):
        method = autotuner.__dict__.get(name)
        if method is not None and hasattr(method, "__wrapped__"):
            setattr(autotuner, name, method.__wrapped__)
