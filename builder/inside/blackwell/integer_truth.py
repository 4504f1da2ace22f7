"""Integer truth: under the null GPU integer and boolean operators run on the CPU, so that shapes, indices and packed lengths are exactly right.

Null device memory is host memory, so a CUDA tensor's bytes can be read and written through a CPU tensor that aliases them. `install`
replaces the CUDA kernels of the operators of integer_truth.toml by ones that do so; the original kernel (a no-op under the null GPU) keeps
everything else: float arithmetic, and anything under FakeTensor or functionalization, which never reach a CUDA kernel.

Also on the CPU: the same operators on small float tensors, so that scalars (a loss scale, a ratio that is rounded to a length) keep their
value, and those that turn floats into indices or truth values (`topk`, `argmax`, comparisons) up to the full size, so that an index made
from garbage is at least a valid one.
"""

import ctypes
import functools
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# More elements than this stay a no-op: it bounds time and memory of e.g. dense attention masks. Operators whose result's *shape* follows from
# the values raise instead, for then a no-op would be a silently wrong shape.
MAX_ELEMENTS = 1 << 24
# The operators run for real on float tensors up to this size.
MAX_FLOAT_ELEMENTS = 1 << 12

_library: Any = None


class IntegerTruthError(RuntimeError):
    """An integer operator can't be computed under the null GPU, and a guess would give wrong shapes."""


@functools.cache
def _table(key: str) -> tuple[str, ...]:
    """A list of integer_truth.toml: "operators", "index_making" or "value_shaped"."""
    return tuple(tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[key])


def installed() -> bool:
    """Has `install` run in this process?"""
    return _library is not None


def install() -> int:
    """Replace the CUDA kernels, tell the null GPU so, and return how many operators were replaced. Idempotent (then 0)."""
    global _library
    import torch

    if _library is not None:
        return 0
    library = torch.library.Library("aten", "IMPL")
    operators = _operators()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Warning only once for all operators"
        )  # "overriding a kernel": that is meant
        for operator in operators:
            library.impl(
                operator, _Truth(operator, torch.library.get_kernel(operator, "CUDA")), "CUDA", with_keyset=True
            )
    _library = library
    ctypes.CDLL("libcuda.so.1").nullgpu_truth_loaded()
    return len(operators)


def _operators() -> list[Any]:
    """The overloads of the table's operators, in-place forms too, that can be given a CUDA kernel without changing their gradient.

    Those made of others in front of autograd (CompositeImplicitAutograd) can't; they reach the others.
    """
    import torch

    found = []
    for base in (form for listed in _table("operators") for form in (listed, f"{listed}_")):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            operator = getattr(packet, overload)
            name = operator.name()
            if not torch._C._dispatch_has_kernel(name):  # TorchScript's own overloads are unknown to the dispatcher
                continue
            keys = [
                k for k in ("CompositeImplicitAutograd", "CUDA", "CompositeExplicitAutograd") if _has_kernel(name, k)
            ]
            if keys and keys[0] != "CompositeImplicitAutograd":
                found.append(operator)
    return found


def _has_kernel(name: str, key: str) -> bool:
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _tensors(values: Any) -> list[Any]:
    import torch

    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_integer(tensor: Any) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def alias(tensor: Any) -> Any:
    """A CPU tensor over the same memory as a null device's tensor: same dtype, sizes, strides and offset."""
    import torch

    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    element = tensor.element_size()
    return (
        raw[: size // element * element]
        .view(tensor.dtype)
        .as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    )


class _Truth:
    """The CUDA kernel of one operator: decides by the arguments between the CPU and the original kernel."""

    def __init__(self, operator: Any, original: Any) -> None:
        self.operator = operator
        self.original = original
        arguments = operator._schema.arguments
        self.names = [argument.name for argument in arguments]
        base = operator._schema.name.partition("::")[2].removesuffix("_")
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.out = [i for i in self.written if arguments[i].is_out]
        self.index_making = base in _table("index_making")
        self.value_shaped = base in _table("value_shaped")
        # pow.Scalar, isin.Scalar_Tensor, bucketize.Scalar: the kernel puts the number on the device as a wrapped tensor and calls another operator with it,
        # which no Python kernel may be given (an internal assert of torch's pybind_utils).
        self.number_first = [str(a.type) for a in arguments[:2]] == ["number", "Tensor"]
        self.makes_indices = base in ("tril_indices", "triu_indices")  # without a tensor argument
        self.tensor_positions = [i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        positional = self._wrapped_numbers(args)
        if not self._applies(positional, kwargs):
            if self.number_first:
                return self._left_empty(positional, kwargs)
            return self.original.call_boxed(keys, *positional, **kwargs)
        try:
            return self._on_cpu(positional, kwargs)
        except (
            NotImplementedError
        ):  # the CPU lacks some float types (float8) that the card has; there is no truth to keep then
            if all(_is_integer(t) for t in _tensors((positional, kwargs))):
                raise
            return self.original.call_boxed(keys, *positional, **kwargs)

    def _left_empty(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a kernel that does nothing leaves: memory of the right shape and type, never written. Arguments are (number, tensor)."""
        import torch

        number, tensor, *rest = args
        out = kwargs.pop("out", None)
        functional = getattr(self.operator.overloadpacket, self.operator._overloadname.removesuffix("_out"))
        # Asked with one element on the CPU: "meta" doesn't know all of them in every torch (2.10's bucketize wants a value).
        like = functional(number, torch.ones([1] * tensor.dim(), dtype=tensor.dtype), *rest, **kwargs)
        shape = tensor.shape if like.dim() else ()  # element by element, or one answer for all
        if out is not None:
            return out.resize_(shape)
        if not like.dim():
            return torch.empty((), dtype=like.dtype, device=tensor.device)
        return torch.empty_like(tensor, dtype=like.dtype)

    def _wrapped_numbers(self, args: Sequence[Any]) -> list[Any]:
        """A Python number in a tensor's place arrives as a number; make it the 0-dimensional tensor that the schema promises."""
        import torch

        positional = list(args)
        like = next((a for a in positional if isinstance(a, torch.Tensor)), None)
        for i in self.tensor_positions:
            if i < len(positional) and isinstance(positional[i], bool | int | float):
                fits = like is not None and (like.dtype.is_floating_point or not isinstance(positional[i], float))
                positional[i] = torch.tensor(positional[i], dtype=like.dtype if like is not None and fits else None)
        return positional

    def _applies(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        import torch

        tensors = _tensors((args, kwargs))
        if not tensors:
            return self.makes_indices
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in tensors):
            return False
        if any(t.layout != torch.strided or t.device.type not in ("cpu", "cuda") for t in tensors):
            return False
        largest = max(t.numel() for t in tensors)
        if all(_is_integer(t) for t in tensors):
            if largest > MAX_ELEMENTS and self.value_shaped:
                raise IntegerTruthError(
                    f"null GPU: {self.operator} of {largest:,} elements; its shape depends on values, and integer truth stops at {MAX_ELEMENTS:,}"
                )
            return bool(largest <= MAX_ELEMENTS)
        return bool(largest <= (MAX_ELEMENTS if self.index_making else MAX_FLOAT_ELEMENTS))

    def _on_cpu(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        import torch

        def to_cpu(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return alias(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = [
            leaf.device if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor | torch.device)
        ]
        device = next(d for d in devices if d.type == "cuda")
        cpu_args = torch.utils._pytree.tree_map(to_cpu, list(args))
        cpu_kwargs = torch.utils._pytree.tree_map(to_cpu, kwargs)
        if isinstance(cpu_kwargs.get("generator"), torch.Generator):
            cpu_kwargs["generator"] = None
        with torch.no_grad():
            if self.out:
                return self._into_out(args, kwargs, cpu_args, cpu_kwargs)
            result = self.operator(*cpu_args, **cpu_kwargs)
            if self.written:
                return args[self.written[0]] if self.operator._schema.returns else None
            return torch.utils._pytree.tree_map(
                lambda v: _to_device(v, device) if isinstance(v, torch.Tensor) else v, result
            )

    def _into_out(
        self, args: Sequence[Any], kwargs: dict[str, Any], cpu_args: list[Any], cpu_kwargs: dict[str, Any]
    ) -> Any:
        """Compute into fresh CPU tensors, then resize and fill the caller's: an alias can't be resized."""
        import torch

        targets = {self.names[i]: args[i] if i < len(args) else kwargs[self.names[i]] for i in self.out}
        fresh = {name: torch.empty(target.shape, dtype=target.dtype) for name, target in targets.items()}
        for i in self.out:
            if i < len(args):
                cpu_args[i] = fresh[self.names[i]]
            else:
                cpu_kwargs[self.names[i]] = fresh[self.names[i]]
        self.operator(*cpu_args, **cpu_kwargs)
        for name, target in targets.items():
            if target.shape != fresh[name].shape:
                target.resize_(fresh[name].shape)
            alias(target).copy_(fresh[name])
        results = tuple(targets.values())
        return results[0] if len(results) == 1 else results


def _to_device(value: Any, device: Any) -> Any:
    """A CPU result as a tensor of the null device, strides kept."""
    import torch

    moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        alias(moved).copy_(value)
    return moved
