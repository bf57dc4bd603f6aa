"""Memory that a CUDA kernel takes from torch's allocator while it runs and gives back at its end.

torch's dispatcher does not show it: it is allocated in C++ below the operation. What is small at the size of language
models (counters, the buffers of reductions and sorts: below 1 MiB) is left out, as are the workspaces of cuBLAS.
Sources are files of PyTorch below aten/src/ATen/native/.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """What torch's CUDA kernels ask of the device that they run on.

    Attributes:
        capability: CUDA's compute capability, 90 for 9.0.
        multiprocessors: how many.
    """

    capability: int
    multiprocessors: int

    @property
    def large_blocks(self) -> bool:
        """Whether a block may use more than 100 KiB of shared memory (CUDA programming guide, compute capabilities)."""
        return self.capability in (80, 90, 100, 103)


# By what the product's name has in it (NVIDIA's data sheets). AMD's devices run other kernels: an A100 stands in.
_GPUS = {
    "V100": Gpu(70, 80),
    "A100": Gpu(80, 108),
    "4090": Gpu(89, 128),
    "L40": Gpu(89, 142),
    "H100": Gpu(90, 132),
    "H200": Gpu(90, 132),
    "B200": Gpu(100, 148),
}


def gpu_of(product: str) -> Gpu:
    """The device of a product's name; an A100 where the name is not known."""
    # GH200 and GB200 have the chips of H200 and B200, whose names theirs contain
    return next((gpu for name, gpu in _GPUS.items() if name in product), _GPUS["A100"])


def scratch(func: Any, args: Any, kwargs: Any, out: Any, gpu: Gpu = _GPUS["A100"]) -> list[int]:
    """Bytes of each temporary of one operation on the device, in order; all are gone when it ends."""
    rule = _RULES.get(func.name().partition(".")[0])
    if rule is None:
        return []
    if rule is not _copy and any(isinstance(part, Tensor) and part.device.type == "cpu" for part in tree_iter(args)):
        return []
    names = [argument.name for argument in func._schema.arguments]
    return rule(_Call({**dict(zip(names, args, strict=False)), **kwargs}, out, gpu))


class _Call:
    """One operation: its arguments by name, its result, the device."""

    def __init__(self, arguments: dict[str, Any], out: Any, gpu: Gpu) -> None:
        self.arguments, self.out, self.gpu = arguments, out, gpu

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _blocks(value: int, size: int) -> int:
    return -(-value // size)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _contiguous(shape: Any, stride: Any) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _swapped(values: Any) -> list[int]:
    """A shape or strides after transpose(1, 2)."""
    return [values[0], values[2], values[1], *values[3:]]


def _copies(*tensors: Tensor | None, swapped: bool = False) -> list[int]:
    """What `.contiguous()` copies; `swapped`: after transpose(1, 2)."""
    turn: Callable[[Any], Any] = _swapped if swapped else list
    return [_nbytes(t) for t in tensors if t is not None and not _contiguous(turn(t.shape), turn(t.stride()))]


# -- attention --------------------------------------------------------------------------------------------------------


def _flash(call: _Call) -> list[int]:
    """mha_fwd and set_params_splitkv in transformers/cuda/flash_attn/flash_api.cpp."""
    query, key = call["query"], call["key"]
    batch, heads, length, width = query.shape
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    rows = batch * heads * _blocks(length, 64)
    splits = 1 if call["dropout_p"] else _splits(rows, 2 * call.gpu.multiprocessors, _blocks(key.shape[2], block))
    if splits == 1:
        return []
    sums = splits * batch * heads * length * FLOAT
    return [sums, sums * _rounded(width, 32 if width <= 128 else 64)]


def _splits(rows: int, processors: int, columns: int) -> int:
    """num_splits_heuristic: the fewest splits of the keys that keep the processors busy to 85 % of the best."""
    if rows >= 0.8 * processors:
        return 1
    most = min(128, processors, columns)
    busy: dict[int, float] = {}
    for splits in range(1, most + 1):
        if splits == 1 or _blocks(columns, splits) != _blocks(columns, splits - 1):
            waves = rows * splits / processors
            busy[splits] = waves / math.ceil(waves)
    return next((splits for splits, share in busy.items() if share >= 0.85 * max(busy.values())), 1)


def _flash_backward(call: _Call) -> list[int]:
    """mha_bwd in flash_api.cpp; the copies: _flash_attention_backward in transformers/cuda/attention_backward.cu."""
    query, key = call["query"], call["key"]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    temporaries = _copies(call["grad_out"], call["out"], swapped=True)
    temporaries += [rows * FLOAT, rows * _rounded(width, 32 if width <= 128 else 64) * FLOAT]  # softmax_d, dq_accum
    if key.shape[1] != heads:  # dk_expanded, dv_expanded
        temporaries += [batch * key.shape[2] * heads * width * key.itemsize] * 2
    return temporaries


def _cudnn_backward(call: _Call) -> list[int]:
    """What cudnn-frontend adds to a workspace (get_fe_workspace_size_node of SDPA backward): dQ_accum, softmax_sum.

    What the plan of cuDNN itself takes is in no source.
    """
    batch, heads, length, width = call["query"].shape
    grad, out = call["grad_out"], call["out"]  # a copy where their layouts differ: run_cudnn_SDP_bprop in cudnn/MHA.cpp
    copy = [] if grad.stride() == out.stride() else [_nbytes(grad)]
    return [*copy, batch * heads * length * (width + 1) * FLOAT]


def _efficient(call: _Call) -> list[int]:
    """For wide heads of 16 bits: kNeedsOutputAccumulatorBuffer in mem_eff_attention/kernel_forward.h."""
    query, value = call["query"], call["value"]
    if query.itemsize != 2 or max(query.shape[3], value.shape[3]) <= 128:
        return []
    return [math.prod(query.shape[:3]) * value.shape[3] * FLOAT]


def _efficient_backward(call: _Call) -> list[int]:
    """_efficient_attention_backward in attention_backward.cu, workspace_size in mem_eff_attention/kernel_backward.h."""
    query, key, value, grad = call["query"], call["key"], call["value"], call["grad_out_"]
    batch, heads, rows, width = query.shape
    columns, depth = key.shape[2], value.shape[3]
    i, j, in_registers = _backward_block(query.itemsize == 2, max(width, depth), bool(call["dropout_p"]), call.gpu)
    half = query.itemsize == 2
    splits = _blocks(columns, j)
    if batch * heads >= 256 and columns <= 2 * j:
        splits = 1
    floats = 0
    if half and not in_registers:  # gk, gv
        splits = max(1, min(splits, 200 // (batch * heads)))
        floats = splits * j * (_rounded(width, i) + _rounded(depth, i))
    floats += _blocks(rows, i) * _blocks(width, j) * (4 + i * j)  # gq: GradQTempStorage has 16 bytes before its buffer
    delta = batch * heads * rows * FLOAT
    temporaries = [delta, batch * heads * _rounded(floats, 4) * FLOAT]
    if not half:  # the kernel leaves delta to torch: (grad_out * out).sum(-1), gone before the workspace comes
        product = [delta * depth, delta, delta]
        temporaries = max(temporaries, product, key=sum)
    return [*_copies(grad, swapped=True), *temporaries]


def _backward_block(half: bool, width: int, dropout: bool, gpu: Gpu) -> tuple[int, int, bool]:
    """(rows, columns, whether dK and dV stay in registers): BwdKernel of mem_eff_attention/kernels/generate_kernels.py.

    The first kernel whose shared memory fits: the large ones want more than devices of 100 KiB have.
    """
    if width <= 64:
        return 64, 64, half
    if width <= 96 and half and not dropout and gpu.capability in (86, 89):
        return 128, 64, True
    i = 128 if gpu.large_blocks else 64
    in_registers = half and width <= 128 and i == 128
    return i, 128 if in_registers else 64, in_registers


def _safe_softmax(call: _Call) -> list[int]:
    """_safe_softmax in transformers/attention.cpp: the softmax, and where its input is minus infinity."""
    return [_nbytes(call.out), call.out.numel()]


# -- the rest ---------------------------------------------------------------------------------------------------------


def _embedding_backward(call: _Call) -> list[int]:
    """embedding_dense_backward_cuda in cuda/Embedding.cu, the kernel in cuda/EmbeddingBackwardKernel.cu."""
    grad, indices = call["grad_output"], call["indices"]
    count = indices.numel()
    copies = _copies(grad)
    if count <= 3072 and not call["scale_grad_by_freq"]:
        return copies
    integers = count * indices.itemsize  # sorted and original indices; segments' offsets, partials, their offsets twice
    return [*copies, *[integers] * 6, count * grad.shape[-1] * max(grad.itemsize, FLOAT)]


def _norm_backward(call: _Call) -> list[int]:
    """LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu: partial sums for very many short rows."""
    grad, data, weight = call["grad_out"], call["input"], call["weight"]
    width = math.prod(call["normalized_shape"])
    rows = data.numel() // max(width, 1)
    temporaries = _copies(grad, data)
    if weight is not None and rows > 64 * 1024 and width // 32 < call.gpu.multiprocessors // 2:
        blocks = min(32 * 1024 // _blocks(width, 32), _blocks(rows, 32))
        temporaries += [blocks * width * weight.itemsize] * sum(call["output_mask"][1:])
    return temporaries


def _foreach_norm(call: _Call) -> list[int]:
    """foreach_tensor_norm_cuda_internal in cuda/ForeachReduceOp.cu: one sum per chunk of 65536 of the longest."""
    tensors = call["self"]
    return [len(tensors) * _blocks(max(t.numel() for t in tensors), 65536) * max(tensors[0].itemsize, FLOAT)]


def _index_put(call: _Call) -> list[int]:
    """index_put_with_sort_kernel in cuda/Indexing.cu: indices made linear, sorted, and their order."""
    if not call["accumulate"]:
        return []
    shapes = [index.shape for index in call["indices"] if index is not None]
    depth = max(len(shape) for shape in shapes)
    count = math.prod(max(s[-d] if d <= len(s) else 1 for s in shapes) for d in range(1, depth + 1))
    return [*_copies(call["values"]), *[count * 8] * 3]


def _isinf(call: _Call) -> list[int]:
    """In TensorCompare.cpp, isinf compares abs() with infinity."""
    return [_nbytes(call["self"])] if call["self"].dtype.is_floating_point else []


def _logsumexp(call: _Call) -> list[int]:
    """logsumexp_out_impl in ReduceOps.cpp: (self - maxes).exp_()."""
    return [call["self"].numel() * call.out.itemsize]


def _matmul(*names: str) -> Callable[[_Call], list[int]]:
    """Copies of operands through which cuBLAS cannot step: prepare_matrix_for_cublas in cuda/Blas.cpp."""

    def rule(call: _Call) -> list[int]:
        temporaries = []
        for operand in (call[name] for name in names):
            rows, columns = operand.shape[-2:]
            down, across = operand.stride()[-2:]
            if not ((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))):
                temporaries.append(_nbytes(operand))
        return temporaries

    return rule


def _contiguous_inputs(*names: str) -> Callable[[_Call], list[int]]:
    """Kernels that begin with `.contiguous()`: host_softmax in cuda/SoftMax.cu, nll_loss in cuda/Loss.cu."""
    return lambda call: _copies(*(call[name] for name in names))


def _copy(call: _Call) -> list[int]:
    """copy_requires_temporaries and copy_kernel_cuda in cuda/Copy.cu: between host and device."""
    target = call.out if call["src"] is None else call["self"]
    source = call["self"] if call["src"] is None else call["src"]
    if (target.device.type == "cpu") == (source.device.type == "cpu"):
        return []
    if target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride():
        return []
    if target.device.type == "cpu":
        return [target.numel() * source.itemsize] * (not _contiguous(source.shape, source.stride()))
    return _copies(target)


_RULES: dict[str, Callable[[_Call], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::native_layer_norm": _contiguous_inputs("input"),
    "aten::native_layer_norm_backward": _norm_backward,
    "aten::_fused_rms_norm": _contiguous_inputs("input"),
    "aten::_fused_rms_norm_backward": _norm_backward,
    "aten::_foreach_norm": _foreach_norm,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::isinf": _isinf,
    "aten::logsumexp": _logsumexp,
    "aten::mm": _matmul("self", "mat2"),
    "aten::addmm": _matmul("mat1", "mat2"),
    "aten::bmm": _matmul("self", "mat2"),
    "aten::baddbmm": _matmul("batch1", "batch2"),
    "aten::_softmax": _contiguous_inputs("self"),
    "aten::_log_softmax": _contiguous_inputs("self"),
    "aten::_softmax_backward_data": _contiguous_inputs("grad_output", "output"),
    "aten::_log_softmax_backward_data": _contiguous_inputs("grad_output", "output"),
    "aten::nll_loss_forward": _contiguous_inputs("self"),
    "aten::copy_": _copy,
    "aten::_to_copy": _copy,
}
