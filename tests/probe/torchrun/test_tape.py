"""The tape counts what is alive, whichever way a tensor comes and goes."""

from __future__ import annotations

import gc

import torch
from torch import nn

from autotune.probe.torchrun.tape import Tape


def alive() -> int:
    """Bytes of all storages that Python can see, each once: another way to the tape's number."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor}
    storages |= {t.untyped_storage()._cdata: t.untyped_storage() for t in gc.get_objects() if type(t) is nn.Parameter}
    return sum(storage.nbytes() for storage in storages.values())


def test_views_share_their_storage_and_keep_it_alive() -> None:
    with Tape() as tape:
        whole = torch.empty(1000)
        part = whole.view(10, 100)[2:4]
        assert tape.live == 4000
        del whole
        assert tape.live == 4000
        del part
        assert tape.live == 0
        assert tape.peak == 4000


def test_temporaries_count_while_they_live_and_the_peak_starts_anew_with_a_phase() -> None:
    with Tape() as tape:
        kept = torch.empty(100)
        (kept + 1).sum()
        assert (tape.live, tape.peak) == (400, 804)
        tape.reset_peak()
        assert tape.peak == tape.live == 400


def test_resized_storages_and_replaced_data_are_followed() -> None:
    with Tape() as tape:
        grown = torch.empty(0)
        grown.resize_(500)
        assert tape.live == 2000
        parameter = nn.Parameter(torch.empty(100))
        parameter.data = torch.empty(50)
        assert tape.live == 2000 + 200


def test_nothing_on_the_meta_device_takes_memory() -> None:
    with Tape() as tape:
        shape = torch.empty(10**9, device="meta")
        assert tape.live == 0
        del shape


def test_a_training_step_leaves_exactly_what_is_alive() -> None:
    gc.collect()
    before = alive()
    with Tape() as tape:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        gc.collect()
        assert tape.live == alive() - before
        parameters = sum(p.numel() for p in model.parameters())
        assert tape.live == 4 * (4 * parameters + len(list(model.parameters())))  # weights, gradients, moments, steps
