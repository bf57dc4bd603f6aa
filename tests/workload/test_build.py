"""Every candidate trains the same model on the same data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.workload.build import FactoryError, build_model, fill_weights, load_factory, make_step_batches
from autotune.workload.step import loss_of
from autotune.workload.workload import Model, Workload

TINY = Workload(
    model=Model(
        name="t",
        type="gpt_neox",
        config={
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 100,
            "hidden_dropout": 0.1,
        },
    ),
    seq_len=16,
)


def test_weights_depend_on_seed_and_name_alone() -> None:
    one, _ = build_model(TINY, "fp32")
    two, _ = build_model(TINY, "fp32")
    fill_weights(one, 1)
    fill_weights(two, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    fill_weights(two, 2)
    assert not torch.equal(one.get_input_embeddings().weight, two.get_input_embeddings().weight)


def test_precisions_agree_to_rounding() -> None:
    whole, _ = build_model(TINY, "fp32")
    half, _ = build_model(TINY, "bf16")
    fill_weights(whole, 1)
    fill_weights(half, 1)
    for a, b in zip(whole.parameters(), half.parameters(), strict=True):
        assert b.dtype is torch.bfloat16
        torch.testing.assert_close(a.bfloat16(), b)


def test_dropout_is_zero_and_the_default_dtype_is_restored() -> None:
    model, _ = build_model(TINY, "bf16")
    assert model.training
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} <= {0.0}
    assert torch.get_default_dtype() is torch.float32


def test_the_global_batch_is_the_same_however_it_is_split() -> None:
    _, make_batch = build_model(TINY, "fp32")

    def tokens(micro_batch: int, accumulation: int, world: int) -> set[tuple[int, ...]]:
        rows = set()
        for rank in range(world):
            for batch in make_step_batches(make_batch, TINY, 3, micro_batch, accumulation, rank, world):
                assert batch["input_ids"].shape == (micro_batch, 16)
                rows |= {tuple(row.tolist()) for row in batch["input_ids"]}
        return rows

    whole = tokens(8, 1, 1)
    assert len(whole) == 8
    assert tokens(2, 2, 2) == tokens(1, 8, 1) == tokens(4, 1, 2) == whole


@pytest.mark.parametrize("path", ["no_such_module:build", "json:no_such_function", "json:__name__"])
def test_a_factory_that_cannot_be_had_is_told_in_a_sentence(path: str) -> None:
    with pytest.raises(FactoryError, match=path):
        load_factory(path)


def test_a_factory_must_return_a_module_and_a_batch_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_factory.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FactoryError, match="must return"):
        build_model(Workload(model=Model(name="c", factory="half_a_factory:build")), "fp32")


@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"loss": x}, lambda x: (x, 1)])
def test_the_loss_is_found_in_whatever_forward_returns(make: object) -> None:
    loss = torch.tensor(2.0)
    assert loss_of(make(loss)) is loss  # type: ignore[operator]


@pytest.mark.parametrize("output", [None, {}, (), torch.zeros(3), {"logits": torch.zeros(1)}])
def test_a_forward_without_a_scalar_loss_is_refused(output: object) -> None:
    with pytest.raises(TypeError, match="without a scalar loss"):
        loss_of(output)
