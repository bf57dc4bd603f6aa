"""How far stage 3's decisions to prefetch are from their limit: what a tape alone does not tell of deeper models.

Until the first optimizer step, DeepSpeed counts small parameters, which it keeps, among those that are live. The more
blocks have passed, the fewer others it fetches ahead, and at some depth one fewer.
"""

from __future__ import annotations

from typing import Any

HEADROOM, DRIFT = "prefetch_headroom", "prefetch_drift"
_COORDINATOR = "_PartitionedParameterCoordinator__"


def watch(facts: dict[str, Any]) -> None:
    """Keep two facts of a run, once per process.

    `prefetch_drift`: elements of kept parameters that a pass counts among the live ones.
    `prefetch_headroom`: by how many elements that count may grow before a prefetch changes; absent where none would.

    Args:
        facts: of the tape.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    gather, fetch = getattr(Coordinator, f"{_COORDINATOR}all_gather_params"), Coordinator.fetch_sub_module
    reset = Coordinator.reset_step
    gathers: list[tuple[int, list[Any]]] = []  # in this call: elements live before each, and its parameters
    drift = 0

    def all_gather_params(self: Any, params: Any, forward: bool) -> None:
        gathers.append((getattr(self, f"{_COORDINATOR}n_available_params"), list(params)))
        gather(self, params, forward)

    def fetch_sub_module(self: Any, module: Any, forward: bool) -> None:
        nonlocal drift
        gathers.clear()
        queue = list(getattr(self, f"{_COORDINATOR}param_queue") or ())
        fetch(self, module, forward)
        if not self.is_complete_trace():
            return  # nothing is fetched ahead yet, and everything is let go
        own = set(module.parameters(recurse=False))
        for live, params in gathers:
            fetched = set(params)
            if drift and not fetched & own:
                order = [item.param for item in queue if item.param in fetched]
                before_last = sum(p.ds_numel for p in list(dict.fromkeys(order))[:-1])
                room = getattr(self, f"{_COORDINATOR}max_n_available_params") - live - before_last
                facts[HEADROOM] = min(room, facts.get(HEADROOM, room))
            drift += sum(p.ds_numel for p in fetched if p.ds_persist)
        facts[DRIFT] = max(drift, facts.get(DRIFT, 0))

    def reset_step(self: Any) -> None:
        nonlocal drift
        drift = 0
        reset(self)

    setattr(Coordinator, f"{_COORDINATOR}all_gather_params", all_gather_params)
    Coordinator.fetch_sub_module = fetch_sub_module
    Coordinator.reset_step = reset_step
