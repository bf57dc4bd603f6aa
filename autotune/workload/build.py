"""Building what is trained, in a rank: the model with the same weights for every candidate, and its batches."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from autotune.workload.workload import Model, Workload

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Batch = Mapping[str, torch.Tensor]
MakeBatch = Callable[[int, int, torch.device], Batch]
"""(sequences, tokens per sequence, device) → the keyword arguments of one forward pass."""


class FactoryError(Exception):
    """Raised when the factory of a custom model cannot be imported or does not return what it must."""


def load_factory(path: str) -> Callable[..., tuple[nn.Module, MakeBatch]]:
    """The function that `package.module:function` names.

    Raises:
        FactoryError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:
        raise FactoryError(f"model.factory={path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise FactoryError(f"model.factory={path} is not a function")
    return factory  # type: ignore[no-any-return]


def build_model(
    workload: Workload, precision: str, place: AbstractContextManager[Any] | None = None
) -> tuple[nn.Module, MakeBatch]:
    """The model in training mode with its own random weights, and the function that makes its batches.

    Args:
        workload: what is trained.
        precision: of the parameters: fp32, fp16 or bf16.
        place: where parameters are born: a torch.device as context, or deepspeed.zero.Init.

    Raises:
        FactoryError: see `load_factory`.
        ValueError: transformers knows no such type, or no causal language model of it.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        torch.set_default_dtype(DTYPES[precision])
        stack.callback(torch.set_default_dtype, before)
        if workload.model.factory:
            factory = load_factory(workload.model.factory)
            if place is not None:
                stack.enter_context(place)
            built = factory(**workload.model.args)
            if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
                raise FactoryError(
                    f"model.factory={workload.model.factory} must return (nn.Module, batch function), "
                    f"not {type(built).__name__}"
                )
            model, make_batch = built
        else:
            model = _transformers_model(workload, precision, stack, place)
            make_batch = _token_batches(workload.model)
    return model.train(), make_batch


def _transformers_model(
    workload: Workload, precision: str, stack: ExitStack, place: AbstractContextManager[Any] | None
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = transformers_config(workload.model)
    if place is not None:
        stack.enter_context(place)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=workload.attention, dtype=DTYPES[precision]
    )
    return model


def transformers_config(model: Model) -> Any:
    """The transformers configuration of a model, without a cache and without dropout.

    Dropout is 0 in probes so that the losses of candidates can be compared.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(model.type, **model.config)
    config.use_cache = False
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _token_batches(model: Model) -> MakeBatch:
    vocabulary = transformers_config(model).get_text_config().vocab_size

    def make_batch(sequences: int, seq_len: int, device: torch.device) -> Batch:
        tokens = torch.randint(0, vocabulary, (sequences, seq_len), device=device)
        return {"input_ids": tokens, "labels": tokens}

    return make_batch


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but its parts, in any process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def fill_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter the values that its name and the seed determine, partitioned or not.

    Matrices are normal with standard deviation 0.02 (GPT-2's initialisation), one-dimensional weights 1 (they scale
    norms), biases 0. `zero.Init` skips a transformers model's own initialisation, so nothing may rely on that.
    """
    import deepspeed

    seen: set[int] = set()
    for module_name, module in model.named_modules():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for _, p in own)
        partitioned = [p for _, p in own if hasattr(p, "ds_id")]
        with (
            deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0, enabled=bool(partitioned)),
            torch.no_grad(),
        ):
            for name, parameter in own:
                _fill(parameter, f"{module_name}.{name}", seed)


def _fill(parameter: nn.Parameter, name: str, seed: int) -> None:
    if parameter.dim() < 2:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator(device=parameter.device).manual_seed(seed_of(seed, name))
    # Drawn in fp32 whatever the precision, so that precisions agree to rounding; in slices, so that an embedding
    # of gigabytes does not need twice its size.
    for part in torch.split(parameter.data, max(1, 2**24 // parameter[0].numel())):
        part.copy_(
            torch.empty(part.shape, device=part.device, dtype=torch.float32).normal_(0, 0.02, generator=generator)
        )


def make_step_batches(
    make_batch: MakeBatch, workload: Workload, step: int, micro_batch: int, accumulation: int, rank: int, world: int
) -> list[Batch]:
    """The micro-batches of one optimizer step on one rank, on the host.

    Sequence i of step s is the same whatever the micro-batch, the accumulation and the rank that sees it, so that
    candidates of one global batch train on the same data.
    """
    host = torch.device("cpu")
    batches: list[Batch] = []
    for micro_step in range(accumulation):
        first = (micro_step * world + rank) * micro_batch
        sequences = []
        for index in range(first, first + micro_batch):
            torch.manual_seed(seed_of(workload.seed, "batch", step, index))
            sequences.append(make_batch(1, workload.seq_len, host))
        batches.append({name: torch.cat([s[name] for s in sequences]) for name in sequences[0]})
    return batches
