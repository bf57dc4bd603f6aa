"""The `cuda` kernel set: the operations that CUDA runs, what they keep, and what they take while they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.probe.virtual import scratch as module
from autotune.probe.virtual.scratch import gpu_of, scratch

Answers = dict[str, Any]
MIB = 2**20

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
PAD = "constant_pad_nd"
# convert_boolean_attn_mask in aten's transformers/attention.cpp: where(mask, 0, -inf), both numbers as tensors
BOOL_MASK = "scalar_tensor scalar_tensor where.self"

# What a dispatch mode sees on CUDA, forward and backward. Sources: derivatives.yaml for the backward of each, and below
# aten/src/ATen/native/ Linear.cpp (addmm where there is a bias), SoftMax.cpp (half_to_float), Dropout.cpp
# (is_fused_kernel_acceptable), layer_norm.cpp (rms_norm), transformers/cuda/sdp_utils.cpp (which attention).
OPERATIONS = {
    "linear": ("addmm", "mm mm sum.dim_IntList"),
    "linear without bias": ("mm", "mm mm"),
    "layer norm": ("native_layer_norm", "native_layer_norm_backward"),
    "rms norm": ("_fused_rms_norm", "_fused_rms_norm_backward"),
    "embedding": ("embedding", "embedding_dense_backward"),
    # the last sum is not in place: each gradient is a view of what its mm made
    "llama mlp": (
        "mm silu mm mul.Tensor mm",
        "mm mm mul.Tensor mul.Tensor mm mm silu_backward mm mm add.Tensor",
    ),
    "silu": ("silu", "silu_backward"),
    "mish": ("mish", "mish_backward"),
    "gelu": ("gelu", "gelu_backward"),
    "gelu tanh": ("gelu", "gelu_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
    "softmax bf16 to fp32": ("_to_copy _softmax", "_softmax_backward_data _to_copy"),
    "softmax fp16 to fp32": ("_softmax", "_softmax_backward_data"),
    "log softmax fp16 to fp32": ("_log_softmax", "_log_softmax_backward_data"),
    "cross entropy": (
        "_to_copy _log_softmax nll_loss_forward",
        "nll_loss_backward _log_softmax_backward_data _to_copy",
    ),
    "dropout 0": ("mul.Tensor", "mul.Tensor"),
    "dropout 0.1": ("native_dropout", "native_dropout_backward"),
    "attention causal": (FLASH, f"{FLASH}_backward"),
    "attention full": (FLASH, f"{FLASH}_backward"),
    "attention grouped": (FLASH, f"{FLASH}_backward"),
    # the copies are AccumulateGrad's, of gradients that do not lie as the (leaf) inputs do
    "attention narrow": (
        f"{PAD} {PAD} {PAD} {FLASH}",
        f"slice_backward {FLASH}_backward {PAD} {PAD} {PAD}" + " new_empty_strided copy_" * 3,
    ),
    "attention wide": (EFFICIENT, f"{EFFICIENT}_backward"),
    "attention mask": (EFFICIENT, f"{EFFICIENT}_backward"),
    "attention bool mask": (f"{BOOL_MASK} {EFFICIENT}", f"{EFFICIENT}_backward"),
    "attention odd mask": (f"{PAD} {EFFICIENT}", f"{EFFICIENT}_backward"),
    # grouped heads with a mask: the plain path, says the documentation of F.scaled_dot_product_attention
    "attention grouped mask": (
        "_to_copy _to_copy _to_copy mul.Scalar clone clone mul.Scalar clone bmm add.Tensor _safe_softmax _to_copy bmm"
        " _to_copy",
        "_to_copy bmm bmm _softmax_backward_data bmm bmm mul.Scalar sum.dim_IntList sum.dim_IntList mul.Scalar"
        " _to_copy _to_copy _to_copy" + " new_empty_strided copy_" * 3,
    ),
    "attention fp32": (EFFICIENT, f"{EFFICIENT}_backward"),
    "attention causal on 4090": (FLASH, f"{FLASH}_backward"),
    "attention causal on H100": (CUDNN, f"{CUDNN}_backward"),
    "attention grouped on H100": (CUDNN, f"{CUDNN}_backward"),
    "attention bool mask on H100": (f"{BOOL_MASK} {CUDNN}", f"{CUDNN}_backward"),
    "attention fp32 on H100": (EFFICIENT, f"{EFFICIENT}_backward"),
}


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    path = tmp_path_factory.mktemp("cuda") / "answers.json"
    program = Path(__file__).with_name("cuda_cases.py")
    root = program.parents[3]
    subprocess.run(
        [sys.executable, str(program), str(path)], check=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", OPERATIONS)
def test_an_operation_is_what_cuda_runs(answers: Answers, case: str) -> None:
    forward, backward = answers["operations"][case]
    assert (" ".join(forward), " ".join(backward)) == OPERATIONS[case]


def test_bf16_attention_has_no_fused_kernel_before_ampere(answers: Answers) -> None:
    forward, _ = answers["operations"]["attention causal on V100"]
    assert "_safe_softmax" in forward
    assert not {FLASH, EFFICIENT, CUDNN} & set(forward)


def test_no_operation_with_a_cuda_kernel_is_decomposed(answers: Answers) -> None:
    assert answers["decomposed"] == []


def test_torch_itself_decides_the_same_for_a_cuda_device(answers: Answers) -> None:
    """Tensors without data on a device of type cuda run torch's own C++ down to the kernels."""
    assert len(answers["compared"]) > 25
    assert {case: both for case, both in answers["compared"].items() if both[0] != both[1]} == {}


def test_the_set_is_loaded_quickly(answers: Answers) -> None:
    assert answers["seconds"] < 0.3


def test_attention_keeps_what_the_real_flash_kernel_keeps(answers: Answers) -> None:
    """Beside q, k, v, out and the log-sum-exp, CUDA's keeps the state of its random numbers (24 bytes)."""
    kept = answers["attention saved"]
    assert [one for one in kept["virtual"] if one[1] != "torch.uint64"] == kept["real"]
    assert [one[0] for one in kept["virtual"] if one[1] == "torch.uint64"] == [[], [2]]


def test_autograd_sums_gradients_in_place_as_it_does_when_no_mode_watches(answers: Answers) -> None:
    assert answers["accumulation"]["virtual"] == answers["accumulation"]["real"]
    assert answers["accumulation"]["real"]["aten::add_"] > 0


@pytest.mark.parametrize("name", ["cpu_adam", "fused_adam"])
def test_an_optimizer_makes_the_states_and_temporaries_of_the_compiled_one(answers: Answers, name: str) -> None:
    assert answers["virtual"][name] == answers["real"][name]
    assert len(answers["real"][name]) >= 2 * 2 * 2  # two states, for each of two parameters, and their ends


def test_clipping_and_torch_optimizers_use_foreach_kernels(answers: Answers) -> None:
    assert answers["foreach"][0] == "aten::_foreach_norm.Scalar"
    assert "aten::_foreach_mul_.Tensor" in answers["foreach"]
    assert "aten::_foreach_addcdiv_.ScalarList" in answers["foreach"]
    assert "aten::addcdiv_" not in answers["foreach"]


def test_temporaries_are_on_the_tape_behind_the_results_and_end_with_the_kernel(answers: Answers) -> None:
    """Causal attention of 2 × 4 heads × 256 × 64 in bf16; the second time is a remembered answer."""
    first, second = answers["scratch rows"]
    size, rows = 2 * 4 * 256 * 64, 2 * 4 * 256
    result, sums, accumulator = ["ALLOC", size * 2], rows * 4, size * 4
    assert first[0][0] == "OP"
    assert first[1:8] == [
        *[result] * 3,
        ["ALLOC", sums],
        ["ALLOC", accumulator],
        ["FREE", accumulator],
        ["FREE", sums],
    ]
    assert second == first


# -- the sizes of temporaries, by hand ---------------------------------------------------------------------------------


def call(name: str, *args: Any, product: str = "A100", out: Any = None, **kwargs: Any) -> list[int]:
    func = getattr(torch.ops.aten, name)
    overload = getattr(func, kwargs.pop("overload", "default"))
    return scratch(overload, args, kwargs, out, gpu_of(product))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv(batch: int, heads: int, keys: int, length: int, width: int, **kwargs: Any) -> list[torch.Tensor]:
    """As models have them: sequence before heads in memory."""
    return [meta(batch, length, n, width, **kwargs).transpose(1, 2) for n in (heads, keys, keys)]


def backward_of_flash(grad: torch.Tensor, tensors: list[torch.Tensor], **kwargs: Any) -> list[int]:
    out, sums = torch.empty_like(tensors[0]), meta(1)
    return call(f"{FLASH}_backward", grad, *tensors, out, sums, None, None, 0, 0, 0.0, True, sums, sums, **kwargs)


def test_flash_backward() -> None:
    """softmax_d is batch × heads × rows rounded to 128, dq_accum that × the width rounded to 32 (flash_api.cpp)."""
    tensors = qkv(4, 64, 64, 2048, 96)
    assert backward_of_flash(torch.empty_like(tensors[0]), tensors) == [4 * 64 * 2048 * 4, 4 * 64 * 2048 * 96 * 4]
    tensors = qkv(1, 8, 8, 1000, 80)
    assert backward_of_flash(torch.empty_like(tensors[0]), tensors) == [8 * 1024 * 4, 8 * 1024 * 96 * 4]
    tensors = qkv(1, 8, 8, 1024, 160)
    assert backward_of_flash(torch.empty_like(tensors[0]), tensors) == [8 * 1024 * 4, 8 * 1024 * 192 * 4]


def test_flash_backward_of_grouped_heads_expands_the_gradients_of_keys_and_values() -> None:
    tensors = qkv(1, 32, 8, 2048, 128)
    expanded = 2048 * 32 * 128 * 2
    assert backward_of_flash(torch.empty_like(tensors[0]), tensors)[2:] == [expanded, expanded]


def test_flash_backward_copies_a_gradient_that_lies_otherwise() -> None:
    tensors = qkv(1, 8, 8, 1024, 64)
    assert backward_of_flash(meta(1, 8, 1024, 64), tensors)[0] == 8 * 1024 * 64 * 2


def test_flash_splits_the_keys_of_few_rows() -> None:
    """Enough rows (1024 of 64 for 108 processors): one kernel. Few: the partial results of each split, in fp32."""
    assert call(FLASH, *qkv(1, 32, 32, 2048, 64), 0.0, True) == []
    # 4 × 16 blocks of rows for 2 × 108 places, 4 blocks of keys of 256: 1 split fills 64/216 of a wave, 2 fill 128/216,
    # 3 have as many blocks each as 2, 4 fill 256/432: 2 are the fewest of the best
    partial = call(FLASH, *qkv(1, 4, 4, 1024, 64), 0.0, True)
    assert partial == [2 * 4 * 1024 * 4, 2 * 4 * 1024 * 64 * 4]
    assert call(FLASH, *qkv(1, 4, 4, 1024, 64), 0.1, True) == []  # not with dropout


def backward_of_efficient(tensors: list[torch.Tensor], product: str = "A100") -> list[int]:
    out, sums = torch.empty_like(tensors[0]), meta(1)
    grad = torch.empty_like(tensors[0])
    flags = [True, True, True, False]
    name = f"{EFFICIENT}_backward"
    return call(name, grad, *tensors, None, out, sums, sums, sums, 0.0, flags, True, product=product)


def test_efficient_backward_in_16_bits() -> None:
    """delta, and a buffer of dQ in tiles: width 64 in 64 × 64, width 128 in 128 × 128 (generate_kernels.py)."""
    tile = 64 * 64 * 4 + 16
    assert backward_of_efficient(qkv(2, 16, 16, 1024, 64)) == [32 * 1024 * 4, 32 * (1024 // 64) * tile]
    tile = 128 * 128 * 4 + 16
    assert backward_of_efficient(qkv(2, 16, 16, 1024, 128)) == [32 * 1024 * 4, 32 * (1024 // 128) * tile]


def test_efficient_backward_on_a_device_of_small_blocks_keeps_dk_and_dv_in_memory() -> None:
    """64 × 64 tiles for width 128; 2 × 16 heads allow 200 // 32 = 6 splits of the keys."""
    gradients = 2 * 6 * 64 * 128
    tiles = (1024 // 64) * (128 // 64) * (64 * 64 + 4)
    assert backward_of_efficient(qkv(2, 16, 16, 1024, 128), "4090")[1] == 32 * (gradients + tiles) * 4


def test_efficient_backward_in_fp32_multiplies_gradient_and_result_first() -> None:
    """The product is larger than one tile buffer where the width is 64: (grad_out * out).sum(-1)."""
    sizes = backward_of_efficient(qkv(1, 8, 8, 512, 64, dtype=torch.float32))
    product, workspace = 8 * 512 * 64 * 4, 8 * (512 // 64) * (64 * 64 * 4 + 16)
    assert sum(sizes) == max(product + 2 * 8 * 512 * 4, workspace + 8 * 512 * 4)


def test_cudnn_backward() -> None:
    """dQ_accum and softmax_sum of cudnn-frontend."""
    tensors = qkv(2, 16, 16, 1024, 128)
    out, sums = torch.empty_like(tensors[0]), meta(1)
    args = (out, *tensors, out, sums, sums, sums, None, None, None, 0, 0, 0.0, True)
    assert call(f"{CUDNN}_backward", *args, product="H100") == [2 * 16 * 1024 * (128 + 1) * 4]


def test_embedding_backward() -> None:
    """Up to 3072 tokens none; then six vectors of indices and the gradient in fp32 (Embedding.cu and its kernel)."""
    few, many = meta(3072, dtype=torch.long), meta(4, 2048, dtype=torch.long)
    name = "embedding_dense_backward"
    assert call(name, meta(3072, 6144), few, 50432, -1, False) == []
    assert call(name, meta(4, 2048, 6144), many, 50432, -1, False) == [*[8192 * 8] * 6, 8192 * 6144 * 4]


def test_layer_norm_backward_has_partial_sums_for_many_short_rows_only() -> None:
    def sizes(rows: int, width: int, name: str = "native_layer_norm_backward") -> list[int]:
        data, weight, mean = meta(rows, width), meta(width), meta(rows, 1)
        if name == "native_layer_norm_backward":
            return call(name, data, data, [width], mean, mean, weight, weight, [True] * 3)
        return call(name, data, data, [width], mean, weight, [True] * 2)

    assert sizes(8192, 6144) == []
    assert sizes(2**17, 2048) == []
    partial = min(32768 // (1024 // 32), 2**17 // 32) * 1024 * 2
    assert sizes(2**17, 1024) == [partial, partial]
    assert sizes(2**17, 1024, "_fused_rms_norm_backward") == [partial]


def test_foreach_norm() -> None:
    """A sum per tensor and per chunk of 65536 of the longest (ForeachReduceOp.cu)."""
    tensors = [meta(6144, 6144), meta(6144)]
    assert call("_foreach_norm", tensors, 2, overload="Scalar") == [2 * 576 * 4]


def test_index_put_sorts_only_where_it_adds_up() -> None:
    target, index, values = meta(8192, 64), meta(100, dtype=torch.long), meta(100, 64)
    assert call("index_put_", target, [index], values, False) == []
    assert call("index_put_", target, [index], values, True) == [800] * 3


def test_comparisons_with_infinity_and_sums_of_exponentials() -> None:
    assert call("isinf", meta(1000, dtype=torch.float16)) == [2000]
    assert call("isinf", meta(1000, dtype=torch.long)) == []
    assert call("logsumexp", meta(8, 1000), [1], out=meta(8)) == [16000]


def test_operands_that_cublas_cannot_step_through_are_copied() -> None:
    assert call("mm", meta(8, 16), meta(4, 16).t()) == []
    assert call("mm", meta(1, 1).expand(8, 16), meta(16, 4)) == [8 * 16 * 2]
    assert call("bmm", meta(1, 8, 16).expand(3, 8, 16), meta(3, 16, 4)) == []


def test_softmax_copies_what_is_not_contiguous() -> None:
    assert call("_softmax", meta(8, 16), 1, False) == []
    assert call("_softmax", meta(16, 8).t(), 1, False) == [8 * 16 * 2]


def test_copies_to_the_host_and_back() -> None:
    """The device's part of what copy_kernel_cuda makes: a host tensor is made contiguous and converted on the host."""
    host = torch.empty(8, 16)
    assert call("copy_", meta(8, 16), host, out=meta(8, 16)) == []
    scattered = meta(16, 8, dtype=torch.float32).t()
    assert call("copy_", scattered, host, out=scattered) == [8 * 16 * 4]
    assert call("copy_", host, meta(16, 8).t(), out=host) == [8 * 16 * 2]
    assert call("copy_", host, meta(8, 16), out=host) == []


def test_operations_on_the_host_take_nothing_of_the_device() -> None:
    assert call("isinf", torch.empty(1000)) == []


def test_most_operations_take_nothing() -> None:
    for name in ("gelu", "silu", "relu", "exp"):
        assert call(name, meta(1000)) == []
    assert "aten::native_dropout" not in module._RULES


@pytest.mark.parametrize(
    ("product", "capability"),
    [
        ("Tesla V100-SXM2-32GB", 70),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA GeForce RTX 4090", 89),
        ("NVIDIA GH200 120GB", 90),
        ("NVIDIA B200", 100),
        ("NVIDIA GB200", 100),
        ("AMD Instinct MI300X", 80),
    ],
)
def test_products_are_known_by_name(product: str, capability: int) -> None:
    assert gpu_of(product).capability == capability
