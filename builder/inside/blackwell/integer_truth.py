"""Integer truth: under the null GPU integer and boolean operators run on the CPU, so that shapes, indices and packed lengths are exactly right.

Null device memory is host memory, so a CUDA tensor's bytes can be read and written through a CPU tensor that aliases them. `install`
replaces the CUDA kernels of the operators below by ones that do so; the original kernel (a no-op under the null GPU) keeps everything else:
float arithmetic, and anything under FakeTensor or functionalization, which never reach a CUDA kernel.

Also on the CPU: the same operators on small float tensors, so that scalars (a loss scale, a ratio that is rounded to a length) keep their
value, and those that turn floats into indices or truth values (`topk`, `argmax`, comparisons) up to the full size, so that an index made
from garbage is at least a valid one.
"""

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any

# More elements than this stay a no-op: it bounds time and memory of e.g. dense attention masks. Operators whose result's *shape* follows from
# the values raise instead, for then a no-op would be a silently wrong shape.
MAX_ELEMENTS = 1 << 24
# Operators below run for real on float tensors up to this size.
MAX_FLOAT_ELEMENTS = 1 << 12

# aten operators by schema name, each with the overloads that have a CUDA kernel of their own.
INTEGER_OPERATORS = ["fill_.Scalar", "fill_.Tensor", "zero_", "copy_", "arange.start_out", "linspace.out", "eye.out", "eye.m_out", "full.out", "add.Tensor", "add_.Tensor", "add.out", "sub.Tensor", "sub_.Tensor", "sub.out", "mul.Tensor", "mul_.Tensor", "mul.out", "neg", "neg.out", "abs", "abs.out", "sgn.out", "sign.out", "div.Tensor", "div_.Tensor", "div.out", "div.Tensor_mode", "div_.Tensor_mode", "div.out_mode", "reciprocal.out", "sqrt.out", "rsqrt.out", "exp.out", "log.out", "log2.out", "ceil", "ceil.out", "floor", "floor.out", "round", "round.out", "round.decimals_out", "trunc", "trunc.out", "floor_divide", "floor_divide.out", "floor_divide_.Tensor", "remainder.Tensor", "remainder.Scalar", "remainder.Tensor_out", "remainder.Scalar_out", "fmod.Tensor", "fmod.Tensor_out", "pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow.Tensor_Tensor_out", "gcd.out", "eq.Tensor", "eq.Tensor_out", "eq.Scalar", "eq.Scalar_out", "ne.Tensor", "ne.Tensor_out", "ne.Scalar", "ne.Scalar_out", "lt.Tensor", "lt.Tensor_out", "lt.Scalar", "lt.Scalar_out", "le.Tensor", "le.Tensor_out", "le.Scalar", "le.Scalar_out", "gt.Tensor", "gt.Tensor_out", "gt.Scalar", "gt.Scalar_out", "ge.Tensor", "ge.Tensor_out", "ge.Scalar", "ge.Scalar_out", "bitwise_and.Tensor", "bitwise_and.Tensor_out", "bitwise_or.Tensor", "bitwise_or.Tensor_out", "bitwise_xor.Tensor", "bitwise_xor.Tensor_out", "bitwise_not", "bitwise_not.out", "bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_out", "bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_out", "__lshift__.Scalar", "__lshift__.Tensor", "__rshift__.Scalar", "__rshift__.Tensor", "__ilshift__.Scalar", "__irshift__.Scalar", "logical_not", "logical_not.out", "logical_and", "logical_and.out", "logical_or", "logical_or.out", "logical_xor", "logical_xor.out", "maximum", "maximum.out", "minimum", "minimum.out", "clamp", "clamp.out", "clamp.Tensor", "clamp.Tensor_out", "clamp_min", "clamp_min.out", "clamp_max", "clamp_max.out", "where.self", "where.self_out", "masked_fill_.Scalar", "masked_fill_.Tensor", "masked_scatter_", "masked_select", "masked_select.out", "cumsum", "cumsum.out", "cumprod", "cumprod.out", "_cummax_helper", "_cummin_helper", "sum", "sum.dim_IntList", "sum.IntList_out", "prod", "prod.dim_int", "prod.int_out", "max", "max.dim", "max.dim_max", "min", "min.dim", "min.dim_min", "amax", "amax.out", "amin", "amin.out", "aminmax", "aminmax.out", "all", "all.dim", "all.out", "all.all_out", "any", "any.dim", "any.out", "any.all_out", "count_nonzero.dim_IntList", "nonzero", "nonzero.out", "nonzero_static", "bincount", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave.Tensor", "index.Tensor", "index.Tensor_out", "index_put_", "_index_put_impl_", "index_select", "index_select.out", "index_add", "index_add.out", "index_fill_.int_Scalar", "take", "take.out", "put_", "gather", "gather.out", "scatter.src_out", "scatter.value_out", "scatter_add", "scatter_add.out", "scatter_add_", "scatter_reduce.two", "scatter_reduce.two_out", "embedding_dense_backward", "cat", "cat.out", "flip", "roll", "tril", "tril.out", "triu", "triu.out", "tril_indices", "triu_indices", "sort.stable", "sort.values_stable", "topk", "topk.values", "argsort.stable", "argmax", "argmax.out", "argmin", "argmin.out", "kthvalue", "kthvalue.values", "searchsorted.Tensor", "searchsorted.Tensor_out", "searchsorted.Scalar", "bucketize.Tensor", "bucketize.Tensor_out", "isin.Tensor_Tensor_out", "equal", "trace", "constant_pad_nd", "histc", "randperm.generator_out", "random_", "random_.from", "random_.to", "is_nonzero", "_local_scalar_dense"]

# Results are indices or truth values whatever the input: run for floats too, while they are small.
INDEX_MAKING = frozenset(
    ["sort", "topk", "argsort", "argmax", "argmin", "kthvalue", "multinomial", "searchsorted", "bucketize", "eq", "ne", "lt", "le", "gt", "ge", "nonzero", "isnan", "isinf", "isfinite", "logical_not", "all", "any"]
)
# The result's shape depends on values: a no-op would be wrong.
VALUE_SHAPED = frozenset(["nonzero", "bincount", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "masked_select"])

_library: Any = None


class IntegerTruthError(RuntimeError):
    """An integer operator can't be computed under the null GPU, and a guess would give wrong shapes."""


def installed() -> bool:
    """Has `install` run in this process?"""
    return _library is not None


def install() -> tuple[str, ...]:
    """Replace the CUDA kernels, tell the null GPU so, and return the operators this torch has no CUDA kernel for (which is fine). Idempotent."""
    global _library
    import torch

    if _library is not None:
        return ()
    library = torch.library.Library("aten", "IMPL")
    absent = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # "overriding a kernel": that is meant
        for name in INTEGER_OPERATORS:
            base, _, overload = name.partition(".")
            try:
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                original = torch.library.get_kernel(operator, "CUDA")
            except (AttributeError, RuntimeError):
                absent.append(name)
                continue
            library.impl(operator, _Truth(operator, original), "CUDA", with_keyset=True)
    _library = library
    ctypes.CDLL("libcuda.so.1").nullgpu_truth_loaded()
    return tuple(absent)


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
    return raw[: size // element * element].view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class _Truth:
    """The CUDA kernel of one operator: decides by the arguments between the CPU and the original kernel."""

    def __init__(self, operator: Any, original: Any) -> None:
        self.operator = operator
        self.original = original
        arguments = operator._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.base = operator._schema.name.partition("::")[2]
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.out = [i for i in self.written if arguments[i].is_out]
        self.tensor_positions = [i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        positional = self._wrapped_numbers(args)
        if not self._applies(positional, kwargs):
            return self.original.call_boxed(keys, *positional, **kwargs)
        try:
            return self._on_cpu(positional, kwargs)
        except NotImplementedError:  # the CPU lacks some float types (float8) that the card has; there is no truth to keep then
            if all(_is_integer(t) for t in _tensors((positional, kwargs))):
                raise
            return self.original.call_boxed(keys, *positional, **kwargs)

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
        if not tensors or any(type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in tensors):
            return False
        if any(t.layout != torch.strided or t.device.type not in ("cpu", "cuda") for t in tensors):
            return False
        largest = max(t.numel() for t in tensors)
        if all(_is_integer(t) for t in tensors):
            if largest > MAX_ELEMENTS and self.base in VALUE_SHAPED:
                raise IntegerTruthError(
                    f"null GPU: {self.operator} of {largest:,} elements; its shape depends on values, and integer truth stops at {MAX_ELEMENTS:,}"
                )
            return largest <= MAX_ELEMENTS
        return largest <= (MAX_ELEMENTS if self.base in INDEX_MAKING else MAX_FLOAT_ELEMENTS)

    def _on_cpu(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        import torch

        def to_cpu(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return alias(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        device = next((t.device for t in _tensors((args, kwargs)) if t.is_cuda), torch.device("cuda", torch.cuda.current_device()))
        cpu_args = torch.utils._pytree.tree_map(to_cpu, list(args))
        cpu_kwargs = torch.utils._pytree.tree_map(to_cpu, kwargs)
        if isinstance(cpu_kwargs.get("generator"), torch.Generator):
            cpu_kwargs["generator"] = None
        with torch.no_grad():
            if self.out:
                return self._into_out(args, kwargs, cpu_args, cpu_kwargs)
            result = self.operator(*cpu_args, **cpu_kwargs)
            if self.written:
                return args[self.written[0]]
            return torch.utils._pytree.tree_map(lambda v: _to_device(v, device) if isinstance(v, torch.Tensor) else v, result)

    def _into_out(self, args: Sequence[Any], kwargs: dict[str, Any], cpu_args: list[Any], cpu_kwargs: dict[str, Any]) -> Any:
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

