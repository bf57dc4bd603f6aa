"""The one description of an optimizer step: real ranks and the virtual engine both run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autotune.workload.build import Batch
from autotune.workload.phase import Phase


def optimizer_step(
    engine: Any, batches: Iterable[Batch], device: torch.device, on_phase: Callable[[Phase], None]
) -> torch.Tensor:
    """Run one optimizer step of a DeepSpeed engine and return the mean loss over its micro-steps, a detached scalar.

    Args:
        engine: what `deepspeed.initialize` returned.
        batches: one mapping of forward arguments per micro-step, on the host; the last one is the boundary. A step
            may be shorter than the engine's own accumulation (sampled accumulation).
        device: where the forward pass runs.
        on_phase: called as each phase begins.

    Nothing here waits for the device: the caller synchronises at the ends of what it times.
    """
    losses: list[torch.Tensor] = []
    micro_steps = list(batches)
    for index, batch in enumerate(micro_steps):
        engine.set_gradient_accumulation_boundary(index == len(micro_steps) - 1)
        on_phase(Phase.FORWARD)
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        loss = loss_of(engine(**inputs))
        del inputs
        losses.append(loss.detach())
        on_phase(Phase.BACKWARD)
        engine.backward(loss)
        del loss
        on_phase(Phase.STEP)
        engine.step()
    return torch.stack(losses).float().mean()


def loss_of(output: Any) -> torch.Tensor:
    """The loss in whatever a forward pass returned.

    Raises:
        TypeError: there is none.
    """
    if isinstance(output, torch.Tensor):
        loss: Any = output
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    else:
        loss = None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            f"the model's forward returned {type(output).__name__} without a scalar loss: return the loss, an object "
            'with .loss, a mapping with "loss", or a tuple that begins with it'
        )
    return loss
