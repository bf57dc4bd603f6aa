"""Real DeepSpeed engines around a tiny model, in a process group of one rank."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from autotune.space.rule import Situation

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
}

# Kept by stage 3 from its config, and read there only where the device is nvme; and numbers that count engines.
_NOT_EFFECTIVE = {"max_params_in_cpu", "offload_optimizer_fast_init", "fp16_partitioned_groups_flat_id"}


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the change written over it, section by section; `...` takes a key out."""
    result = dict(base)
    for name, value in change.items():
        if value is ...:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


class Engines:
    """Starts engines as `deepspeed.initialize` does, and says what is effective in them."""

    def __init__(self) -> None:
        import deepspeed
        import torch

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", verbose=False)
        self.deepspeed, self.torch = deepspeed, torch

    @staticmethod
    def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
        return merged(base, change)

    def full(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """A whole config, with buckets small enough for a test wherever ZeRO is on."""
        config = merged(BASE, change)
        zero = config.get("zero_optimization")
        if isinstance(zero, Mapping) and zero.get("stage") in (1, 2, 3):
            config["zero_optimization"] = {"reduce_bucket_size": 200, **zero}
        return config

    def situation(self, change: Mapping[str, Any], world_size: int = 1) -> Situation:
        """What a rule sees of that config."""
        return Situation(self.full(change), world_size, "cpu")

    def config(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """DeepSpeed's own reading of a config."""
        from deepspeed.runtime.config import DeepSpeedConfig

        read = vars(DeepSpeedConfig(self.full(change)))
        return {name: str(vars(value) if hasattr(value, "__dict__") else value) for name, value in read.items()} | {
            "_param_dict": ""
        }

    def run(self, change: Mapping[str, Any], look: Callable[[Any], Any] = lambda engine: None, steps: int = 1) -> Any:
        """Start an engine, take steps, look at it, and end it."""
        torch = self.torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        engine, *_ = self.deepspeed.initialize(model=model, config=self.full(change))
        try:
            kind = next(engine.module.parameters()).dtype
            for _ in range(steps):
                engine.backward(engine(torch.ones(2, 8, dtype=kind)).float().pow(2).mean())
                engine.step()
            return look(engine)
        finally:
            engine.destroy()

    def effective(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """What an engine keeps of its config where it trains: optimizers, buffers, and the weights after a step.

        Its config object is left out: that holds what was written, also where nothing reads it.
        """
        return self.run(change, self._effective)

    def _effective(self, engine: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "accumulation": engine.gradient_accumulation_steps(),
            "communication": str(engine.communication_data_type),
            "basic": (type(engine.basic_optimizer).__name__, str(engine.basic_optimizer.defaults)),
        }
        parts = {"optimizer": engine.optimizer, "fetching": getattr(engine.optimizer, "parameter_offload", None)}
        coordinator = getattr(parts["fetching"], "param_coordinator", None)
        for part, thing in {**parts, "coordinator": coordinator}.items():
            found[part] = type(thing).__name__
            for name, value in sorted(vars(thing).items()) if thing is not None else []:
                if name not in _NOT_EFFECTIVE:
                    found[f"{part}.{name}"] = self._plain(value)
        for kind, bucket in getattr(engine.optimizer, "ipg_buckets", {}).items():
            found[f"bucket.{kind}"] = self._plain(bucket.buffer)
        with self.deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            found["weights"] = [p.detach().float().sum().item() for p in engine.module.parameters()]
        return found

    def _plain(self, value: Any) -> Any:
        torch = self.torch
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return str(value)
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), str(value.device), value.numel())
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        return type(value).__name__


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    rank |= {"LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    before = dict(os.environ)
    os.environ.update(rank)
    try:
        started = Engines()
        yield started
        started.torch.distributed.destroy_process_group()
    finally:
        os.environ.clear()
        os.environ.update(before)
