"""What a training program does on a card, one small function each; run by nullgpu_helper under the null GPU, every function in its own fork.

A section fails by raising. Values of floats are never checked: no kernel runs. Shapes, integers, devices and errors are.
"""

import faulthandler
import io
import os
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from blackwell import integer_truth
from torch import nn

DEVICE = "cuda"


def resident_mebibytes() -> float:
    """Memory that this process really occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def raises(*parts: str) -> Iterator[None]:
    """The body raises an error whose text holds every part."""
    try:
        yield
    except Exception as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError("nothing was raised")


class Block(nn.Module):
    """A transformer layer in miniature."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self, vocabulary: int = 97, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, a scalar."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, (2, 32) each."""
    tokens = torch.randint(0, 97, (2, 32)).to(DEVICE)
    return tokens, tokens.roll(-1, 1)


# ---- the card ----


def card_is_the_profile() -> None:
    p = torch.cuda.get_device_properties(0)
    assert (p.name, p.major, p.minor) == ("NVIDIA B200", 10, 0)
    assert (p.multi_processor_count, p.total_memory, p.max_threads_per_multi_processor) == (148, 191490555904, 2048)
    assert (p.shared_memory_per_block_optin, p.shared_memory_per_multiprocessor, p.L2_cache_size) == (
        232448,
        233472,
        132644864,
    )
    assert torch.cuda.device_count() == 2
    assert torch.cuda.mem_get_info(0)[1] == p.total_memory


def devices_are_distinct() -> None:
    one, two = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1", dtype=torch.int64)
    assert (one.device.index, two.device.index) == (0, 1)
    assert torch.cuda.memory_allocated(0) and torch.cuda.memory_allocated(1)
    assert one.to("cuda:1").device.index == 1
    assert two.to("cuda:0").tolist() == [1, 1, 1, 1]
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1 and torch.cuda.current_device() == 1
    assert torch.cuda.can_device_access_peer(0, 1)
    from torch.cuda import cudart

    assert int(cudart().cudaMemGetInfo(1)[1]) == 191490555904


def memory_runs_out_like_on_the_card() -> None:
    kept = torch.empty(150 << 30, dtype=torch.uint8, device=DEVICE)
    with raises("out of memory"):
        torch.empty(50 << 30, dtype=torch.uint8, device=DEVICE)
    del kept
    torch.cuda.empty_cache()
    assert torch.empty(150 << 30, dtype=torch.uint8, device=DEVICE).numel() == 150 << 30


def hundred_gigabytes_cost_nothing() -> None:
    before = resident_mebibytes()
    weights = [nn.Linear(16384, 16384, bias=False, device=DEVICE, dtype=torch.bfloat16) for _ in range(100)]
    total = sum(p.numel() * 2 for w in weights for p in w.parameters())
    x = torch.ones(2, 16384, device=DEVICE, dtype=torch.bfloat16)
    for weight in weights:
        x = weight(x)
    x.sum().backward()
    for weight in weights:
        weight.weight.grad.zero_()
        weight.weight.grad = None
    weights[0].weight.data.copy_(torch.ones(16384, 16384, dtype=torch.bfloat16))
    assert total > 50e9
    del x
    states = [torch.zeros_like(w.weight, dtype=torch.bfloat16) for w in weights]
    assert total + sum(s.numel() * 2 for s in states) > 100e9
    del states[:]
    assert resident_mebibytes() - before < 1000, resident_mebibytes() - before


# ---- training ----


def training_step_fused_adamw() -> None:
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        loss = model(*batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.shape == () and loss.device.type == "cuda"
    assert all(p.grad is None for p in model.parameters())


def optimizers() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=False, capturable=True),
        lambda p: torch.optim.Adafactor(p),
    ):
        model = Block().to(DEVICE)
        optimizer = make(model.parameters())
        model(torch.ones(2, 8, 64, device=DEVICE)).sum().backward()
        optimizer.step()


def grad_scaler_and_autocast() -> None:
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(DEVICE, dtype):
            loss = model(*batch())
            assert F.linear(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device=DEVICE)).dtype == dtype
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536.0


def checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        block = Block().to(DEVICE)
        x = torch.ones(2, 16, 64, device=DEVICE, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def attention_backends() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        q, k, v = (torch.ones(2, 4, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.sum().backward()
        assert out.shape == q.shape and q.grad.shape == q.shape, backend


def convolutions_and_norms() -> None:
    for layer, shape in (
        (nn.Conv1d(16, 32, 3, padding=1), (2, 16, 20)),
        (nn.Conv1d(32, 32, 4, groups=32, padding=3), (2, 32, 20)),
        (nn.Conv2d(8, 16, 3, stride=2), (2, 8, 17, 17)),
        (nn.BatchNorm1d(16), (8, 16)),
        (nn.BatchNorm2d(16), (4, 16, 9, 9)),
        (nn.GroupNorm(4, 16), (2, 16, 9)),
    ):
        x = torch.ones(shape, device=DEVICE, requires_grad=True)
        expected = layer(x.detach().cpu()).shape
        y = layer.to(DEVICE)(x)
        y.sum().backward()
        assert y.shape == expected and x.grad.shape == x.shape, layer


def embedding_and_losses() -> None:
    table = nn.Embedding(50, 16).to(DEVICE)
    tokens = torch.arange(12, device=DEVICE).view(3, 4)
    out = table(tokens)
    assert out.shape == (3, 4, 16)
    out.sum().backward()
    assert table.weight.grad.shape == (50, 16)
    logits = torch.ones(6, 50, device=DEVICE, requires_grad=True)
    for options in ({}, {"ignore_index": -100}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        F.cross_entropy(logits, torch.arange(6, device=DEVICE), **options).sum().backward()
    assert logits.grad.shape == logits.shape


def low_precision_and_grouped_products() -> None:
    a = torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16)
    e4 = torch.float8_e4m3fn
    one = torch.ones((), device=DEVICE)
    assert torch._scaled_mm(a.to(e4), a.to(e4).t(), one, one, out_dtype=torch.bfloat16).shape == (64, 64)
    assert torch.bmm(a.view(4, 16, 64), a.view(4, 64, 16)).shape == (4, 16, 16)
    assert torch.addmm(a[0], a, a).shape == (64, 64)
    assert torch.einsum("ij,kj->ik", a, a).shape == (64, 64)


def many_operators() -> None:
    x = torch.ones(6, 8, device=DEVICE, requires_grad=True)
    y = (
        F.softmax(x, -1)
        + F.gelu(x)
        + F.silu(x) * torch.sigmoid(x)
        + x.exp().log1p().rsqrt()
        + torch.tanh(x).pow(2).cumsum(0)
    )
    y = F.layer_norm(F.dropout(y, 0.5), (8,)) + F.normalize(x) + torch.where(x > 0, x, -x).clamp(0, 1)
    y = torch.cat([y, y.flip(0)]).view(2, 6, 8).transpose(1, 2).contiguous().mean(0) @ x
    (y.norm() + y.var() + y.std() + y.logsumexp(0).sum() + y.amax()).backward()
    assert x.grad.shape == x.shape
    nn.init.normal_(x.data)
    nn.init.kaiming_uniform_(x.data)
    assert torch.nn.functional.pad(x, (1, 1)).shape == (6, 10)
    assert torch.stft(torch.ones(1, 8), 4, return_complex=True).shape[0] == 1  # on the CPU; cuFFT is a separate section


# ---- CUDA's machinery ----


def streams_and_events() -> None:
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.ones(8, device=DEVICE)
    start.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        y = x * 2
        x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0 and side.query() and end.query() and y.shape == (8,)


def cuda_graphs() -> None:
    linear = nn.Linear(8, 8).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = linear(x)
        torch.cuda.current_stream().wait_stream(side)
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
    assert y.shape == (4, 8)
    block = Block().to(DEVICE)
    captured = torch.cuda.make_graphed_callables(block, (torch.ones(2, 8, 64, device=DEVICE, requires_grad=True),))
    captured(torch.ones(2, 8, 64, device=DEVICE, requires_grad=True)).sum().backward()


def profiler() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        (torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)).sum()
    assert any(event.key == "aten::mm" for event in run.key_averages())
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()


def pinned_memory() -> None:
    x = torch.arange(1000).pin_memory()
    assert x.is_pinned() and not torch.arange(3).is_pinned()
    y = x.to(DEVICE, non_blocking=True)
    assert y.tolist() == list(range(1000))
    assert torch.empty(10, pin_memory=True).is_pinned()
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, pin_memory=True)
    assert [b[0].to(DEVICE).tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def save_and_load() -> None:
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(*batch()).backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.cuda.get_rng_state()}, buffer
    )
    buffer.seek(0)
    state = torch.load(buffer, map_location=DEVICE, weights_only=True)
    other = Model().to(DEVICE)
    other.load_state_dict(state["model"])
    torch.optim.AdamW(other.parameters(), fused=True).load_state_dict(state["optimizer"])
    torch.cuda.set_rng_state(state["rng"].cpu())
    assert state["model"]["head.weight"].device.type == "cuda"
    whole = torch.arange(5, device=DEVICE)
    with tempfile.TemporaryFile() as file:
        torch.save(whole, file)
        file.seek(0)
        assert torch.load(file).tolist() == [0, 1, 2, 3, 4]


def expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    x = [torch.empty(200 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    del x[1]
    torch.cuda.empty_cache()
    grown = torch.zeros(900 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.arange(7, device=DEVICE).tolist() == list(range(7)) and grown.numel() == 900 << 20
    assert any(s["is_expandable"] for s in torch.cuda.memory_snapshot())


def check_collectives(rank: int) -> None:
    """The collectives of a training program as rank 0 or 1 of 2; the group exists."""
    import torch.distributed as dist

    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    torch.cuda.set_device(rank)
    count = torch.tensor([3, 5], device=DEVICE)
    dist.all_reduce(count)
    assert count.tolist() == [6, 10]
    longest = torch.tensor([7], device=DEVICE)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    assert longest.item() == 7
    gathered = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    dist.all_gather_into_tensor(gathered, torch.tensor([1, 2], device=DEVICE))
    assert gathered.tolist() == [1, 2, 1, 2]
    scattered = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    dist.reduce_scatter_tensor(scattered, torch.arange(4, device=DEVICE))
    assert scattered.tolist() == [[0, 2], [4, 6]][rank]
    dist.broadcast(count, 0)
    dist.barrier(device_ids=[rank])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": rank}] * 2
    model = nn.parallel.DistributedDataParallel(Block().to(DEVICE), device_ids=[rank])
    model(torch.ones(2, 8, 64, device=DEVICE)).sum().backward()
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(Block().to(DEVICE))
    sharded(torch.ones(2, 8, 64, device=DEVICE)).sum().backward()
    assert sharded.qkv.weight.to_local().shape == (96, 64) and sharded.qkv.weight.device.index == rank


def rank_0_without_peers() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
    check_collectives(0)


def rank_of_two(rank: int, directory: str) -> None:
    """One of two processes; does not return."""
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    check_collectives(rank)
    os._exit(0)


def two_processes_two_devices() -> None:
    """New processes, as ranks are: in a forked one torch's thread pool can be made by two of autograd's threads at once, and aborts."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import nullgpu_sections as s; s.rank_of_two(int(sys.argv[1]), sys.argv[2])"
    with tempfile.TemporaryDirectory() as directory:
        ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank), directory]) for rank in range(2)]
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]


# ---- integer truth ----


def packed_lengths_are_exact() -> None:
    lengths = torch.tensor([3, 5, 8], device=DEVICE)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    assert offsets.tolist() == [0, 3, 8, 16] and offsets.dtype == torch.int64
    segments = torch.repeat_interleave(torch.arange(3, device=DEVICE), lengths)
    assert segments.tolist() == [0] * 3 + [1] * 5 + [2] * 8
    assert torch.repeat_interleave(lengths).tolist() == segments.tolist()
    position = torch.arange(16, device=DEVICE) - offsets[segments]
    assert position.tolist() == [*range(3), *range(5), *range(8)]
    assert (segments[1:] != segments[:-1]).nonzero().flatten().tolist() == [2, 7]
    assert torch.searchsorted(offsets, torch.tensor([0, 4, 15], device=DEVICE), right=True).tolist() == [1, 2, 3]
    assert (lengths / 4).ceil().int().tolist() == [1, 2, 2]
    assert ((lengths + 3) // 4).sum().item() == 5
    assert torch.unique(segments, return_counts=True)[1].tolist() == [3, 5, 8]
    assert torch.bincount(segments).tolist() == [3, 5, 8]


def integer_operators_match_the_cpu() -> None:
    torch.manual_seed(3)
    a, b = torch.randint(-50, 50, (6, 7)), torch.randint(1, 9, (6, 7))
    index = torch.randint(0, 6, (4,))
    mask = a > 0
    programs = {
        "arithmetic": lambda a, b, i, m: a * b - a + 3 * b - a.abs() + a.neg().sign(),
        "division": lambda a, b, i, m: (
            a // b + a % b + torch.div(a, b, rounding_mode="trunc") + torch.fmod(a, b) + b**2
        ),
        "power": lambda a, b, i, m: torch.stack(
            [a**2, 2**b, (b % 5) ** (b % 3), b.clone().pow_(b % 3), torch.pow(b, b % 2)]
        ),
        "bits": lambda a, b, i, m: (a & b) | (a ^ b) | (b << 2) | (a >> 1) | ~a,
        "compare": lambda a, b, i, m: torch.stack([a == b, a != b, a < b, a <= b, a > b, a >= b, a == 3, a > 2]),
        "logic": lambda a, b, i, m: torch.stack([m & (b > 3), m | (b > 3), ~m, m ^ (b > 3), torch.logical_not(a)]),
        "reduce": lambda a, b, i, m: torch.stack(
            [a.sum(), a.prod(), a.max(), a.min(), a.argmax(), a.argmin(), m.sum(), a.sum(0).sum()]
        ),
        "dims": lambda a, b, i, m: torch.stack(
            [a.sum(1), a.max(1)[0], a.min(1)[1], a.amax(1), a.argmax(1), m.any(1).long(), m.all(1).long()]
        ),
        "scan": lambda a, b, i, m: (
            a.cumsum(1) + b.cumprod(1) + a.cummax(0)[0] + a.flip(0).roll(2, 1) + a.tril() + a.triu(1)
        ),
        "gather": lambda a, b, i, m: torch.cat(
            [a[i], a.index_select(0, i), a.gather(1, b[:, :3] % 7).t().reshape(-1, 1).expand(-1, 7)]
        ),
        "write": lambda a, b, i, m: (
            a.clone().index_fill_(0, i, 9).masked_fill_(m, -1).index_put_((i,), b[:4]).scatter_(1, b % 7, 5)
        ),
        "scatter_add": lambda a, b, i, m: torch.zeros_like(a).scatter_add_(1, b % 7, a).index_add_(0, i, b[:4]),
        "sort": lambda a, b, i, m: torch.cat(
            [a.sort(1)[0], a.sort(dim=1, stable=True)[1], a.topk(7, 1)[0], a.argsort(1)]
        ),
        "select": lambda a, b, i, m: torch.cat(
            [a[m], a.masked_select(m), torch.where(m, a, b).flatten(), m.nonzero().flatten()]
        ),
        "unique": lambda a, b, i, m: torch.cat(
            [torch.unique(a), torch.unique_consecutive(b.flatten().sort()[0]), torch.bincount(b.flatten())]
        ),
        "make": lambda a, b, i, m: torch.cat(
            [torch.arange(3, 20, 4, device=a.device), torch.full((3,), 7, device=a.device), torch.ones_like(a[0])]
        ),
        "clamp": lambda a, b, i, m: torch.cat(
            [a.clamp(-5, 5), a.clamp(min=b), torch.maximum(a, b), torch.minimum(a, b)]
        ),
        "convert": lambda a, b, i, m: torch.cat(
            [a.to(torch.int32).long(), a.to(torch.uint8).long(), a.float().long(), m.long(), a.double().int().long()]
        ),
        "strided": lambda a, b, i, m: torch.cat(
            [a.t().contiguous().flatten(), a[::2, 1::3].flatten(), (a.t() + b.t()).flatten(), a[:, 2]]
        ),
        "one_hot": lambda a, b, i, m: F.one_hot(b % 5, 5),
        "isin": lambda a, b, i, m: (
            torch.isin(a, i).long() + torch.bucketize(a, torch.arange(-50, 50, 10, device=a.device))
        ),
        "mesh": lambda a, b, i, m: (
            torch.stack(torch.meshgrid(i, i, indexing="ij")) + torch.tril_indices(4, 4, device=a.device).sum()
        ),
        "inplace": lambda a, b, i, m: (
            a.clone().add_(b).mul_(2).sub_(1).floor_divide_(3).bitwise_and_(15).clamp_(max=9).neg_()
        ),
        "methods": lambda a, b, i, m: torch.cat(
            [a.diff(dim=1).flatten(), a.median().view(1), a.mode(0)[0], a.unfold(1, 3, 2).sum(-1).flatten()]
        ),
        "foreach": lambda a, b, i, m: torch.stack(torch._foreach_add([a, b], [b, a])).long(),
    }
    wrong = {}
    for name, program in programs.items():
        expected = program(a, b, index, mask)
        got = program(a.to(DEVICE), b.to(DEVICE), index.to(DEVICE), mask.to(DEVICE))
        if (
            got.device.type != "cuda"
            or got.dtype != expected.dtype
            or got.shape != expected.shape
            or got.tolist() != expected.tolist()
        ):
            wrong[name] = (got.device, got.dtype, got.flatten()[:20].tolist(), expected.flatten()[:20].tolist())
    assert not wrong, wrong


def numbers_before_tensors_of_any_size() -> None:
    """Every operator of the table that takes a number and then a tensor, below and above the limits of integer truth."""
    with (Path(integer_truth.__file__).with_suffix(".toml")).open("rb") as file:
        operators = tomllib.load(file)["operators"]
    answers = {"isin": torch.bool, "bucketize": torch.int64}  # others answer in the tensor's type
    called = []
    for packet in (getattr(torch.ops.aten, name, None) for name in operators):
        for overload in map(packet.__getattr__, packet.overloads()) if packet is not None else ():
            arguments = overload._schema.arguments
            kinds = [str(argument.type) for argument in arguments if not argument.has_default_value()]
            if kinds[:2] != ["number", "Tensor"] or (len(kinds) == 3) != overload._schema.is_mutable or len(kinds) > 3:
                continue
            dtypes = (
                (torch.int32,)
                if "bitwise" in str(overload) or "shift" in str(overload)
                else (torch.int32, torch.float32)
            )
            for dtype in dtypes:
                for size in (4, integer_truth.MAX_FLOAT_ELEMENTS + 1, integer_truth.MAX_ELEMENTS + 1):
                    tensor = torch.ones(size, dtype=dtype, device=DEVICE)
                    like = overload(
                        2,
                        torch.ones(1, dtype=dtype),
                        **_out(arguments, answers.get(str(packet).partition(".")[2], dtype), "cpu"),
                    )
                    got = overload(2, tensor, **_out(arguments, like.dtype, DEVICE))
                    shape = tensor.shape if like.dim() else ()  # isin answers once for all
                    assert (got.shape, got.dtype, got.device.type) == (shape, like.dtype, DEVICE), overload
            called.append(str(overload))
    assert {"aten.pow.Scalar", "aten.pow.Scalar_out", "aten.remainder.Scalar_Tensor"} <= set(called), called


def _out(arguments: Any, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    return {a.name: torch.empty(0, dtype=dtype, device=device) for a in arguments if a.is_out}


def values_reach_python() -> None:
    x = torch.tensor([4, 5, 6], device=DEVICE)
    assert x.tolist() == [4, 5, 6] and x[1].item() == 5 and int(x[2]) == 6 and bool((x == 5).any())
    assert x.cpu().numpy().tolist() == [4, 5, 6] and x.clone().tolist() == [4, 5, 6]
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    assert torch.tensor(2.5, device=DEVICE).item() == 2.5
    large = torch.arange(3_000_000, device=DEVICE)
    assert large[-1].item() == 2_999_999 and large.to("cpu").sum().item() == 2_999_999 * 3_000_000 // 2
    split = torch.ones(10, 2, device=DEVICE).split(torch.tensor([3, 7], device=DEVICE).tolist())
    assert [s.shape[0] for s in split] == [3, 7]


def indices_from_garbage_are_valid() -> None:
    logits = torch.empty(128, 64, device=DEVICE).normal_()
    _values, chosen = logits.topk(4, dim=-1)
    assert int(chosen.max()) < 64 and int(chosen.min()) >= 0
    assert sorted(logits.argsort(-1)[0].tolist()) == list(range(64))
    assert torch.bincount(chosen.flatten(), minlength=64).sum().item() == 128 * 4
    assert 0 <= logits.argmax().item() < logits.numel()


def block_mask_is_exact() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 200, 212]))

    def mask(on: str) -> Any:
        ids = document.to(on)
        return create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, 512, 512, device=on)

    got, expected = mask(DEVICE), mask("cpu")
    for field in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert getattr(got, field).tolist() == getattr(expected, field).tolist(), field


def truth_leaves_fake_tensors_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.arange(5, device=DEVICE) + 1
        assert type(x).__name__ == "FakeTensor" and x.shape == (5,)
    y = torch.func.vmap(lambda r: r.cumsum(0))(torch.arange(6, device=DEVICE).view(2, 3))
    assert y.tolist() == [[0, 1, 3], [3, 7, 12]]


def truth_in_threads() -> None:
    failed = []

    def work(n: int) -> None:
        for _ in range(20):
            if torch.arange(n, device=DEVICE).cumsum(0)[-1].item() != n * (n - 1) // 2:
                failed.append(n)

    threads = [threading.Thread(target=work, args=(100 + i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed


# ---- what it can't do fails, and says so ----


def unsupported_libraries_fail() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    with raises("cuFFT error"):
        torch.fft.fft(x)
    with raises("cusolver error"):
        torch.linalg.svd(x)
    with raises("cusolver error"):
        torch.linalg.qr(x)
    with raises("cusparse"):
        x.to_sparse_csr() @ x


def refused_calls_name_the_null_gpu() -> None:
    import ctypes

    runtime = next(Path(name) for name in os.environ["LD_PRELOAD"].split(":") if "libcudart.so" in name)
    cudart = ctypes.CDLL(runtime.name)
    cudart.cudaGetErrorString.restype = ctypes.c_char_p
    assert cudart.cudaMallocArray(None, None, 0, 0, 0) == 801
    assert cudart.cudaGetErrorString(801) == b"the null GPU doesn't implement cudaMallocArray"
    driver = ctypes.CDLL("libcuda.so.1")
    text = ctypes.c_char_p()
    assert driver.cuArrayCreate_v2(None, None) == 801
    driver.cuGetErrorString(801, ctypes.byref(text))
    assert text.value == b"the null GPU doesn't implement cuArrayCreate_v2"
    table = ctypes.c_void_p()
    assert driver.cuGetExportTable(ctypes.byref(table), None) != 0
    with raises("null GPU"):
        torch.nn.LSTM(4, 4).to(DEVICE)(torch.ones(2, 3, 4, device=DEVICE))
    with raises("integer truth stops at"):
        torch.ones((1 << 24) + 1, dtype=torch.bool, device=DEVICE).nonzero()


# ---- the runner ----

HELPERS = {
    "_out",
    "batch",
    "check_collectives",
    "raises",
    "resident_mebibytes",
    "run_forked",
    "contextmanager",
    "rank_of_two",
}
SECTIONS = {
    name: f
    for name, f in globals().items()
    if isinstance(f, FunctionType) and f.__module__ == __name__ and name not in HELPERS
}


def run_forked(name: str, seconds: int) -> tuple[bool, str]:
    """Run one section in a fork; it passed when its success mark arrived, whatever the exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        faulthandler.dump_traceback_later(seconds - 5)  # says where a section hangs
        try:
            SECTIONS[name]()
            os.write(write, b"\nPASSED")
        except BaseException:  # also SystemExit: the parent must get the text
            import traceback

            os.write(write, traceback.format_exc().encode())
        os._exit(0)
    os.close(write)
    timer = threading.Timer(seconds, lambda: os.kill(child, 9))
    timer.start()
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    timer.cancel()
    # Not at the end of it: a thread of torch may warn in the moment between the mark and the exit.
    return "\nPASSED" in text, text + ("" if os.WIFEXITED(status) else f"\nended by signal {os.WTERMSIG(status)}")


if __name__ == "__main__":
    import json

    results = {}
    for section in sys.argv[2:] or SECTIONS:
        results[section] = run_forked(section, 600)
        print(section, results[section][0], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results))
    os._exit(0)
