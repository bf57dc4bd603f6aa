"""What operations become on the virtual device, on a device that torch takes for CUDA, and on the CPU for real.

A program of its own, because the virtual device changes its process: `python cuda_cases.py OUT.json` answers all
questions of test_cuda_set.py at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.probe.virtual import cuda_set, device, kernels
from autotune.probe.virtual.compute import VirtualRecorder
from autotune.probe.virtual.recorder import Recorder
from autotune.probe.virtual.scope import Scope
from autotune.probe.virtual.scratch import scratch
from autotune.probe.virtual.tape import Kind, TapeWriter

BF16, HALF, FLOAT, LONG, BOOL = torch.bfloat16, torch.float16, torch.float32, torch.long, torch.bool
Make = Callable[..., Tensor]
Case = Callable[[Make], Callable[[], Tensor]]
VGPU = "vgpu:0"  # which torch knows only once it is registered


def recorder_for(kind: type[Recorder]) -> Recorder:
    writer = TapeWriter()
    return kind(writer, Scope(writer))


def make(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=VGPU, requires_grad=grad and dtype.is_floating_point)


def layer(kind: Any, *args: Any, **kwargs: Any) -> Any:
    return kind(*args, device=VGPU, dtype=BF16, **kwargs)


class LlamaMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (layer(nn.Linear, 64, 128, bias=False) for _ in range(2))
        self.down = layer(nn.Linear, 128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def of_module(build: Callable[[], Any], dtype: torch.dtype = BF16, shape: tuple[int, ...] = (2, 8, 64)) -> Case:
    def case(t: Make) -> Callable[[], Tensor]:
        module, x = build(), t(*shape, dtype=dtype)
        return lambda: module(x)

    return case


def of_function(function: Callable[..., Tensor], *inputs: dict[str, Any]) -> Case:
    def case(t: Make) -> Callable[[], Tensor]:
        tensors = [t(*one.pop("shape"), **one) for one in (dict(one) for one in inputs)]
        return lambda: function(*tensors)

    return case


def of_attention(
    heads: int = 4, keys: int = 4, length: int = 16, width: int = 64, dtype: torch.dtype = BF16, **options: Any
) -> Case:
    mask = options.pop("mask", None)

    def case(t: Make) -> Callable[[], Tensor]:
        q, k, v = (t(2, length, n, width, dtype=dtype).transpose(1, 2) for n in (heads, keys, keys))
        bias = None if mask is None else t(2, 1, length, length, dtype=mask, grad=False)
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)

    return case


X = {"shape": (2, 8, 64)}
CASES: dict[str, Case] = {
    "linear": of_module(lambda: layer(nn.Linear, 64, 32)),
    "linear without bias": of_module(lambda: layer(nn.Linear, 64, 32, bias=False)),
    "layer norm": of_module(lambda: layer(nn.LayerNorm, 64)),
    "rms norm": of_module(lambda: layer(nn.RMSNorm, 64)),
    "embedding": of_module(lambda: layer(nn.Embedding, 64, 32), LONG, (2, 8)),
    "llama mlp": of_module(LlamaMlp),
    "silu": of_function(F.silu, X),
    "mish": of_function(F.mish, X),
    "gelu": of_function(F.gelu, X),
    "gelu tanh": of_function(lambda x: F.gelu(x, approximate="tanh"), X),
    "softmax": of_function(lambda x: F.softmax(x, -1), X),
    "softmax bf16 to fp32": of_function(lambda x: F.softmax(x, -1, dtype=FLOAT), X),
    "softmax fp16 to fp32": of_function(lambda x: F.softmax(x, -1, dtype=FLOAT), {**X, "dtype": HALF}),
    "log softmax fp16 to fp32": of_function(lambda x: F.log_softmax(x, -1, dtype=FLOAT), {**X, "dtype": HALF}),
    "cross entropy": of_function(
        lambda x, y: F.cross_entropy(x.float(), y), {"shape": (16, 64)}, {"shape": (16,), "dtype": LONG}
    ),
    "dropout 0": of_function(lambda x: F.dropout(x, 0.0) * 2.0, X),
    "dropout 0.1": of_function(lambda x: F.dropout(x, 0.1), X),
    "attention causal": of_attention(is_causal=True),
    "attention full": of_attention(),
    "attention grouped": of_attention(keys=2, is_causal=True, enable_gqa=True),
    "attention narrow": of_attention(width=60),
    "attention wide": of_attention(width=264),
    "attention mask": of_attention(mask=BF16),
    "attention bool mask": of_attention(mask=BOOL),
    "attention odd mask": of_attention(length=15, mask=BF16),
    "attention grouped mask": of_attention(keys=2, mask=BF16, enable_gqa=True),
    "attention fp32": of_attention(dtype=FLOAT, is_causal=True),
}
OTHER_GPUS = {
    ("H100", "attention causal"),
    ("H100", "attention grouped"),
    ("H100", "attention bool mask"),
    ("H100", "attention fp32"),
    ("4090", "attention causal"),
    ("V100", "attention causal"),
}


def operations(case: Case, product: str = "A100") -> list[list[str]]:
    """The kernels on the tape of [forward, backward]."""
    cuda_set.use_cuda_set(product)
    recorder = recorder_for(VirtualRecorder)
    recorder.scratch = scratch
    rows = recorder.writer.rows
    with recorder:
        run = case(make)
        start = len(rows)
        out = run()
        middle = len(rows)
        grad = torch.empty_like(out)
        end = len(rows)
        out.backward(grad)
    names = list(recorder.writer._names)
    return [
        [names[row[3]].removeprefix("aten::") for row in part if row[0] in (Kind.OP, Kind.COPY)]
        for part in (rows[start:middle], rows[end:])
    ]


# -- the same on a device that torch takes for CUDA: forward only, as autograd would ask the driver --------------------

COMPARED: dict[str, Callable[[Make], Any]] = {
    "linear 2d": lambda t: F.linear(t(4, 8), t(16, 8), t(16)),
    "linear 3d": lambda t: F.linear(t(2, 4, 8), t(16, 8), t(16)),
    "linear transposed": lambda t: F.linear(t(4, 2, 8).transpose(0, 1), t(16, 8), t(16)),
    "linear without bias": lambda t: F.linear(t(2, 4, 8), t(16, 8)),
    "matmul": lambda t: (torch.matmul(t(2, 3, 4, 8), t(2, 3, 8, 4)), torch.matmul(t(2, 3, 4), t(4, 8))),
    "einsum": lambda t: torch.einsum("bhid,bhjd->bhij", t(2, 2, 3, 4), t(2, 2, 5, 4)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 3, 3), t(2, 3, 4), t(2, 4, 3)),
    "softmax": lambda t: [F.softmax(t(4, 8, dtype=d), -1, dtype=FLOAT) for d in (HALF, BF16, FLOAT)],
    "log softmax": lambda t: [F.log_softmax(t(4, 8, dtype=d), -1, dtype=FLOAT) for d in (HALF, BF16, FLOAT)],
    "rms norm": lambda t: (F.rms_norm(t(4, 8), (8,), t(8)), F.rms_norm(t(4, 8), (8,), t(8, dtype=FLOAT))),
    "layer norm": lambda t: F.layer_norm(t(4, 8), (8,), t(8), t(8)),
    "group norm": lambda t: F.group_norm(t(4, 8, 3), 2, t(8), t(8)),
    "dropout": lambda t: [F.dropout(t(4, 4), p) for p in (0.0, 0.1, 1.0)],
    "activations": lambda t: [f(t(4, 8)) for f in (F.gelu, F.silu, F.mish, F.relu, F.glu, F.softplus, F.hardswish)],
    "losses": lambda t: (F.mse_loss(t(4), t(4)), F.kl_div(t(4), t(4)), F.cross_entropy(t(4, 8), t(4, dtype=LONG))),
    "smoothed loss": lambda t: F.cross_entropy(t(4, 8), t(4, dtype=LONG), label_smoothing=0.1),
    "norms": lambda t: (t(4, 5).norm(2), torch.linalg.vector_norm(t(4, 5), 2, dtype=FLOAT)),
    "one hot": lambda t: F.one_hot(t(4, dtype=LONG), 8),
    "embedding": lambda t: F.embedding(t(4, dtype=LONG), t(8, 4)),
    "weight norm": lambda t: torch._weight_norm(t(4, 4), t(4, 1), 0),
    "grouped mm": lambda t: F.grouped_mm(t(16, 8), t(4, 8, 16), offs=t(4, dtype=torch.int32)),
    "convolution": lambda t: F.conv1d(t(2, 4, 8), t(4, 4, 3), t(4)),
    "shapes": lambda t: (torch.stack([t(4), t(4)]), torch.cat([t(4), t(4)]), t(2, 2, 3).repeat_interleave(2, 1)),
    "order": lambda t: (torch.sort(t(8)), torch.topk(t(4, 8), 2), t(4, 4).cumsum(0), torch.argsort(t(8, dtype=LONG))),
    "masks": lambda t: (t(4, 4).masked_fill(t(4, 4, dtype=BOOL), 0.0), torch.tril(t(4, 4)), F.pad(t(4, 4), (0, 1))),
    "rotary": lambda t: torch.view_as_complex(t(2, 4, 2, dtype=FLOAT)) * torch.view_as_complex(t(2, 4, 2, dtype=FLOAT)),
    "experts": lambda t: t(8, 4).index_add_(0, t(4, dtype=LONG), t(4, 4)),
    "foreach": lambda t: torch._foreach_add_([t(4), t(4)], [t(4), t(4)]),
}


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() != "prim::device":
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def compared() -> dict[str, list[list[str]]]:
    fake, answers = FakeTensorMode(allow_non_fake_inputs=True), {}
    cuda = torch.library.Library("aten", "IMPL", "CUDA")  # a build for CPUs lacks these kernels
    for name in cuda_set.kernels_that_decompose():
        cuda.impl(name, lambda *args, **kwargs: None)
    for case, function in COMPARED.items():
        answers[case] = []
        for where in ("cuda", "vgpu"):

            def tensor(*shape: int, dtype: torch.dtype = BF16, where: str = where) -> Tensor:
                return FakeTensor(fake, torch.empty(shape, dtype=dtype, device="meta"), torch.device(where, 0))

            with fake, Names() as names:
                function(tensor)
            answers[case].append([name for name in names.names if not name.startswith("empty")])
    return answers


def decomposed() -> list[str]:
    """Operations with a kernel on CUDA, by the whole of native_functions.yaml, that torch decomposes on vgpu."""
    functions = cuda_set._functions()
    answers = []
    for name, text in functions.items():
        delegate = cuda_set._parsed(text).get("structured_delegate")
        keys = cuda_set._dispatch(text) | (cuda_set._dispatch(functions[delegate]) if delegate else set())
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        full = f"aten::{name}"
        if "CUDA" in keys and has(full, "CompositeImplicitAutograd") and not has(full, "PrivateUse1"):
            answers.append(name)
    return answers


# -- against real kernels ---------------------------------------------------------------------------------------------


@contextmanager
def saved(into: list[tuple[tuple[int, ...], str]]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        into.append((tuple(tensor.shape), str(tensor.dtype)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def attention_saved(where: str) -> list[tuple[tuple[int, ...], str]]:
    """What autograd keeps of causal attention with torch's flash kernel, which the CPU has too."""
    kept: list[tuple[tuple[int, ...], str]] = []
    q, k, v = (torch.zeros(2, 4, 32, 64, dtype=BF16, device=where, requires_grad=True) for _ in range(3))
    with saved(kept):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return sorted(kept)


def accumulation(where: str) -> Callable[[], None]:
    """Gradients of a residual stream, which autograd sums in place where it holds the only one."""
    x, w = (torch.zeros(*shape, device=where, requires_grad=True) for shape in ((4, 8, 16), (16, 16)))

    def run() -> None:
        h = x * 1
        for _ in range(3):
            h = h + F.gelu(h @ w)
        h.sum().backward()

    return run


def accumulation_real() -> dict[str, int]:
    run = accumulation("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages() if event.key in ("aten::add", "aten::add_")}


def accumulation_virtual() -> dict[str, int]:
    recorder = recorder_for(VirtualRecorder)
    recorder.scratch = scratch
    with recorder:
        run = accumulation(VGPU)
        run()
    names = list(recorder.writer._names)
    count = Counter(names[row[3]].partition(".")[0] for row in recorder.writer.rows if row[0] == Kind.OP)
    return {name: count[name] for name in ("aten::add", "aten::add_")}


def optimizer(name: str, kind: type[Recorder]) -> list[tuple[Any, ...]]:
    """What two steps of one of DeepSpeed's optimizers do to memory on the CPU."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    recorder = recorder_for(kind)
    if kind is VirtualRecorder:
        kernels.replace_deepspeed_operations(recorder)
    with recorder:
        parameters = [nn.Parameter(torch.zeros(n, dtype=FLOAT)) for n in (1000, 24)]
        adam = {"cpu_adam": DeepSpeedCPUAdam, "fused_adam": FusedAdam}[name](parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            adam.step()
        del adam, parameters, parameter
    return [(Kind(row[0]).name, row[6]) for row in recorder.writer.rows if row[0] in (Kind.ALLOC, Kind.FREE)]


def foreach() -> list[str]:
    recorder = recorder_for(VirtualRecorder)
    with recorder:
        parameters = [nn.Parameter(make(8, 8)) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        adam = torch.optim.AdamW(parameters)
        start = len(recorder.writer.rows)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
    names = list(recorder.writer._names)
    return [names[row[3]] for row in recorder.writer.rows[start:] if row[0] == Kind.OP]


def scratch_rows() -> list[list[Any]]:
    """The rows around the backward of flash attention, twice: the second is remembered."""
    cuda_set.use_cuda_set("A100")
    recorder = recorder_for(VirtualRecorder)
    recorder.scratch = scratch
    answers = []
    with recorder:
        for _ in range(2):
            run = of_attention(length=256, is_causal=True)(make)
            out = run()
            grad = torch.empty_like(out)
            start = len(recorder.writer.rows)
            out.backward(grad)
            answers.append([[Kind(row[0]).name, row[6]] for row in recorder.writer.rows[start:]])
            del out, grad, run
    return answers


def answer() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers: dict[str, Any] = {"real": {name: optimizer(name, Recorder) for name in ("cpu_adam", "fused_adam")}}
    answers["attention saved"] = {"real": attention_saved("cpu")}
    answers["accumulation"] = {"real": accumulation_real()}
    device.adapt_torch()
    answers["virtual"] = {name: optimizer(name, VirtualRecorder) for name in ("cpu_adam", "fused_adam")}
    device.register()
    start = time.perf_counter()
    kernels.use_cuda_kernels()
    answers["seconds"] = time.perf_counter() - start
    answers["accumulation"]["virtual"] = accumulation_virtual()
    with recorder_for(VirtualRecorder):
        answers["attention saved"]["virtual"] = attention_saved(VGPU)
    answers["operations"] = {name: operations(case) for name, case in CASES.items()}
    answers["operations"] |= {f"{name} on {gpu}": operations(CASES[name], gpu) for gpu, name in sorted(OTHER_GPUS)}
    answers["foreach"] = foreach()
    answers["scratch rows"] = scratch_rows()
    answers["decomposed"] = decomposed()
    answers["compared"] = compared()
    return answers


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer()))
