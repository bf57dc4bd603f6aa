"""Has the virtual device run the kernels that CUDA would run, where torch would choose others for an unknown device.

Three things make torch choose: operations that it decomposes unless a backend has a kernel for them, decisions by the
type of the device in C++ (attention, half-precision softmax), and lists of types in Python (foreach).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
import yaml  # type: ignore[import-untyped] # ships no types
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autotune.probe.virtual.scratch import gpu_of

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
_libraries: list[torch.library.Library] = []
_gpu = gpu_of("A100")


def use_cuda_set(product: str = "") -> None:
    """Make the virtual device run what CUDA runs on a device of that name. More than once per process is fine."""
    global _gpu
    _gpu = gpu_of(product)
    if _libraries:
        return
    _register("PrivateUse1", dict.fromkeys(kernels_that_decompose(), _never))
    # What a composite operation consists of is decided above autograd's kernel, so what stands in for it is put there.
    choices = {"scaled_dot_product_attention": attention, "softmax.int": _softmax, "log_softmax.int": _log_softmax}
    _register("AutogradPrivateUse1", choices)
    # clipping and torch.optim use foreach kernels for plain tensors on this device, and these count as plain
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    optimizer._foreach_supported_types.append(FakeTensor)


def _register(key: str, kernels: dict[str, Any]) -> None:
    library: Any = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call] # torch types it not
    for name, kernel in kernels.items():
        library.impl(name, kernel)
    _libraries.append(library)  # one that is collected takes its kernels back


def kernels_that_decompose() -> list[str]:
    """Operations with a kernel on CUDA that torch decomposes on a backend without one, by native_functions.yaml."""
    functions = _functions()
    names = []
    for name, text in functions.items():
        # reading all of it takes half a second, and a handful of functions is composite and has kernels
        if "CompositeImplicitAutograd" not in text or ("CUDA" not in text and "structured_delegate" not in text):
            continue
        dispatch = _dispatch(text)
        delegate = _parsed(text).get("structured_delegate")
        on_cuda = dispatch | (_dispatch(functions[delegate]) if delegate else set())
        if "CompositeImplicitAutograd" in dispatch and "CUDA" in on_cuda:
            names.append(name)
    return names


def _functions() -> dict[str, str]:
    """The functions of native_functions.yaml: name → their part of its text."""
    path = resources.files("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml"
    _, *parts = path.read_text(encoding="utf-8").split("\n- func: ")
    return {part[: part.index("(")]: f"- func: {part}" for part in parts}


def _parsed(text: str) -> dict[str, Any]:
    [function] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return dict(function)


def _dispatch(text: str) -> set[str]:
    """The backends for which a function has a kernel of its own."""
    return {key.strip() for keys in _parsed(text).get("dispatch", {}) for key in keys.split(",")}


def _never(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the virtual device runs nothing: a recorder must be active")


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As softmax in aten's SoftMax.cpp: CUDA's kernel reads float16 and writes float32."""
    fused = input.dtype == torch.float16 and dtype == torch.float32
    out: Tensor = _aten._softmax(input if fused or dtype is None else input.to(dtype), dim, fused)
    return out


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As log_softmax in aten's SoftMax.cpp."""
    fused = input.dtype == torch.float16 and dtype == torch.float32
    out: Tensor = _aten._log_softmax(input if fused or dtype is None else input.to(dtype), dim, fused)
    return out


# -- attention --------------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention in aten's transformers/attention.cpp, with CUDA's choice of a kernel."""
    backend = next(_backends(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # convert_boolean_attn_mask
        lowest = -65504.0 if backend == "cudnn" else -math.inf
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, lowest)
    out: Tensor
    if backend == "cudnn":
        out = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    elif backend == "flash":
        width = query.size(-1)
        scale = 1 / math.sqrt(width) if scale is None else scale
        if width % 8:  # pad_last_dim
            query, key, value = (_aten.pad(x, (0, -width % 8)) for x in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        out = out[..., :width] if width % 8 else out
    elif backend == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    else:
        out = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def _aligned(mask: Tensor) -> Tensor:
    """preprocess_mask and pad_bias in attention.cpp: rows that begin at multiples of 8."""
    if mask.stride(-1) == 1 and not any(step % 8 for step in mask.stride()[:-1]):
        return mask
    width = mask.size(-1)
    padded: Tensor = _aten.pad(mask, (0, 8 - width % 8))
    return padded[..., :width]


def _backends(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> Iterator[str]:
    """The kernels that can run, best first: can_use_*_attention in aten's transformers/cuda/sdp_utils.cpp."""
    tensors = (query, key, value)
    switches = torch.backends.cuda
    needs_grad = any(x.requires_grad for x in tensors)
    types = (*_HALF,) if _gpu.capability >= 80 else (torch.float16,)
    width, depth = query.size(-1), value.size(-1)
    four = all(x.dim() == 4 for x in tensors) and not any(x.numel() == 0 for x in tensors)  # check_tensor_shapes
    batches = four and query.size(0) == key.size(0) == value.size(0)
    same_heads = batches and query.size(1) == key.size(1) == value.size(1)
    grouped = batches and gqa and key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0
    rows = four and all(x.stride(-1) == 1 for x in tensors)
    if (
        _prefers_cudnn()
        and switches.cudnn_sdp_enabled()  # type: ignore[no-untyped-call] # torch types it not
        and rows
        and (same_heads or grouped)
        and query.dtype in types
        and (mask is None or _mask_fits(mask, query, key))
        and float(dropout * 16).is_integer()
        and max(width, depth) <= 128
        and width % 8 == depth % 8 == 0
        and key.size(2) != 1
    ):
        yield "cudnn"
    # Not trained by flash attention on devices of 8.6 and 8.9: backward of wide heads
    narrow = width <= 192 or not (needs_grad and _gpu.capability in (86, 89)) or (width > 224 and not dropout)
    if (
        switches.flash_sdp_enabled()  # type: ignore[no-untyped-call] # torch types it not
        and _gpu.capability >= 80
        and rows
        and (same_heads or grouped)
        and query.dtype in types
        and mask is None
        and width == depth == key.size(-1) <= 256
        and narrow
        and (not causal or query.size(2) == key.size(2))
    ):
        yield "flash"
    half = query.dtype in _HALF
    alignment = 8 if half else 4 if _gpu.capability >= 80 else 1  # minimum_gemm_alignment
    if (
        switches.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call] # torch types it not
        and rows
        and same_heads  # grouped heads: F.scaled_dot_product_attention says that flash and math take them
        and query.dtype in (*types, torch.float32)
        and width == key.size(-1)
        and width % alignment == depth % alignment == 0
        and not any(x.storage_offset() % alignment for x in tensors)
    ):
        yield "efficient"
    yield "math"


def _prefers_cudnn() -> bool:
    """check_prefer_cudnn_attention: on 9.0, 10.0 and 10.3, with cuDNN after 9.15.0, which wheels for CUDA 13 bring.

    Those are what PyPI has of torch from 2.11 on.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return _gpu.capability in (90, 100, 103) and version >= (2, 11)


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """check_attn_mask_shape in sdp_utils_cpp.h."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    sizes = (query.size(0), query.size(1), query.size(2), key.size(2))
    return all(have in (1, want) for have, want in zip(mask.shape, sizes[-mask.dim() :], strict=True))
