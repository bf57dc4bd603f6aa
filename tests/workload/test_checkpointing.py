"""Checkpointing finds the blocks of any model, really recomputes them, and notices when it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn

from autotune.workload.checkpointing import (
    CheckpointingError,
    HostInput,
    SavedBytes,
    apply_checkpointing,
    choose_blocks,
    find_blocks,
    find_part,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16,) * 6) -> None:
        super().__init__()
        self.head = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.layers = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(autouse=True)
def _no_ledger() -> Iterator[None]:
    yield
    HostInput.ledger = None


class TestBlocks:
    @pytest.mark.parametrize(
        ("kind", "blocks", "more"),
        [
            ("gpt_neox", "GPTNeoXLayer", {}),
            ("gpt2", "GPT2Block", {"n_layer": 4, "n_embd": 64, "n_head": 4}),
            ("llama", "LlamaDecoderLayer", {}),
            ("qwen2", "Qwen2DecoderLayer", {}),
            ("mixtral", "MixtralDecoderLayer", {"num_local_experts": 4}),
            ("opt", "OPTDecoderLayer", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
        ],
    )
    def test_are_found_in_the_models_of_transformers_with_their_parts(
        self, kind: str, blocks: str, more: dict[str, int]
    ) -> None:
        shape = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        config = transformers.AutoConfig.for_model(kind, vocab_size=128, **({} if "n_layer" in more else shape), **more)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        _, found = find_blocks(model)
        assert [type(block).__name__ for block in found] == [blocks] * 4
        assert find_part(found[0], "attention") is not found[0]
        if kind != "opt":  # whose mlp is two layers of the block itself
            assert find_part(found[0], "mlp") is not find_part(found[0], "attention")

    def test_are_the_list_that_holds_most_parameters(self) -> None:
        name, blocks = find_blocks(Model())
        assert (name, len(blocks)) == ("layers", 6)

    def test_are_missed_with_a_sentence(self) -> None:
        with pytest.raises(CheckpointingError, match="no list of repeated blocks"):
            find_blocks(nn.Linear(4, 4))

    def test_are_the_first_of_alike_ones_and_the_largest_of_others(self) -> None:
        alike = list(Model().layers)
        assert choose_blocks(alike, "quarter") == [0, 1]
        assert choose_blocks(alike, "half") == [0, 1, 2]
        assert choose_blocks(alike, "all") == list(range(6))
        assert choose_blocks(list(Model((16, 64, 16, 32)).layers), "half") == [1, 3]


class TestRecomputation:
    @pytest.mark.parametrize("part", ["whole", "attention", "mlp"])
    @pytest.mark.parametrize("where", ["device", "cpu"])
    def test_changes_no_gradient_and_saves_only_the_input(self, part: str, where: str) -> None:
        torch.manual_seed(0)
        model, x = Model(), torch.randn(4, 16)
        plain = gradients(model, x)
        targets = apply_checkpointing(model, "half", part, where)
        assert len(targets) == 3
        with SavedBytes(targets) as saved:
            checkpointed = gradients(model, x)
        saved.check()
        assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
        assert set(saved.saved.values()) == {x.numel() * 4}

    def test_keeps_class_name_and_parameters(self) -> None:
        model = Model()
        before = [name for name, _ in model.named_parameters()]
        apply_checkpointing(model, "all", "whole", "device")
        assert [name for name, _ in model.named_parameters()] == before
        assert isinstance(model.layers[0], Block)
        assert type(model.layers[0]).__name__ == "Block"

    def test_accounts_for_what_it_moves_to_the_host_and_gives_it_back(self) -> None:
        moves: list[int] = []
        HostInput.ledger = moves.append
        model, x = Model(), torch.randn(4, 16)
        apply_checkpointing(model, "all", "whole", "cpu")
        gradients(model, x)
        assert moves[:6] == [256] * 6
        assert sum(moves) == 0

    def test_that_never_happens_is_noticed(self) -> None:
        model = Model()
        targets = apply_checkpointing(model, "all", "whole", "device")
        with SavedBytes(targets) as saved:
            for layer in model.layers:
                layer.forward(torch.randn(4, 16))
        with pytest.raises(CheckpointingError, match="never called as a module"):
            saved.check()

    def test_without_an_effect_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autotune.workload.checkpointing.checkpoint", lambda call, *args, **options: call(*args))
        model = Model()
        targets = apply_checkpointing(model, "all", "whole", "device")
        with SavedBytes(targets) as saved:
            gradients(model, torch.randn(4, 16))
        with pytest.raises(CheckpointingError, match="had no effect: it saves"):
            saved.check()
