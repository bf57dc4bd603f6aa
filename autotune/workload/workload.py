"""What is trained: model, sequence length, global batch, precision, optimizer. Plain data for every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass
class Model:
    """A model class and its shape.

    Attributes:
        name: what studies are called after.
        type: a `transformers` model type (`gpt_neox`, `llama`, …); empty for a custom model.
        config: the fields of that type's configuration.
        factory: for `model=custom`, `package.module:function`. It is called with `args` and returns the nn.Module
            and a function `(micro_batch, seq_len, device) -> dict` of forward arguments; forward returns the loss
            (a scalar, an object with `.loss`, a mapping with "loss", or a tuple whose first item it is).
        args: keyword arguments of the factory.
        published_on: the machine config on which the model was published, where known.
        published_nodes: how many nodes of it are planned for where no machine is named.
    """

    name: str = "???"
    type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    factory: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    published_on: str | None = None
    published_nodes: int = 1


@dataclass
class Optimizer:
    """The optimizer section of the DeepSpeed config: `type` as DeepSpeed spells it, `params` its keyword arguments."""

    type: str = "AdamW"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scheduler:
    """The scheduler section of the DeepSpeed config; written only where the workload gives one."""

    type: str = "???"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Workload:
    """What is trained.

    Attributes:
        seq_len: tokens per sequence; probes use full sequences.
        global_batch: sequences per optimizer step over all devices; None leaves accumulation free.
        precision: fp32, fp16 or bf16 (a knob where the space lists it).
        grad_accum_dtype: DeepSpeed's `data_types.grad_accum_dtype`; None is the model's own.
        communication_data_type: DeepSpeed's key of that name; None is the model's own.
        gradient_clipping: DeepSpeed's key of that name, 0 for none.
        attention: `attn_implementation` of transformers.
        seed: of weights and data.
        tensor_parallel, sequence_parallel: 1; anything else is refused for now.
    """

    model: Model = field(default_factory=Model)
    seq_len: int = 2048
    global_batch: int | None = None
    precision: str = "bf16"
    grad_accum_dtype: str | None = None
    communication_data_type: str | None = None
    gradient_clipping: float = 1.0
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler | None = None
    attention: str = "sdpa"
    seed: int = 1234
    tensor_parallel: int = 1
    sequence_parallel: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        """The workload that `to_dict` wrote."""
        known = dict(values)
        known["model"] = Model(**known["model"])
        known["optimizer"] = Optimizer(**known["optimizer"])
        known["scheduler"] = Scheduler(**known["scheduler"]) if known["scheduler"] else None
        return cls(**known)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal exactly when two workloads are."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
