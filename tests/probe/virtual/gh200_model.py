"""The model of the published GH200 measurements, built from the description beside them (a factory for model=custom).

32 blocks, hidden 4096, 32 heads, 8 key/value heads repeated by expand and reshape before attention, SwiGLU 14336,
RMSNorm computed in fp32 and cast back, rotary by complex multiplication in fp32, untied output of 131072, no biases;
the loss is the summed cross entropy of fp32 logits over the tokens, and the logits are gone before backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.width)
        k = self.wk(x).view(batch, length, self.kv_heads, self.width)
        v = self.wv(x).view(batch, length, self.kv_heads, self.width)
        q, k = rotate(q, turns), rotate(k, turns)
        repeats = self.heads // self.kv_heads
        k, v = (
            t[:, :, :, None, :].expand(-1, -1, -1, repeats, -1).reshape(batch, length, self.heads, self.width)
            for t in (k, v)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, kv_heads)
        self.feed_forward = FeedForward(hidden, inner)
        self.attention_norm, self.ffn_norm = RMSNorm(hidden), RMSNorm(hidden)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(
        self, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, seq_len: int
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, kv_heads, inner) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        frequencies = 1.0 / (500000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles)[None, :, None, :], persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        turns = self.turns  # complex: casting the module to bf16 would take the imaginary part away
        super()._apply(fn, recurse)
        self.turns = turns.to(self.turns.device)
        return self

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = layer(h, self.turns)
        logits = self.output(self.norm(h))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / labels.numel()
        del logits
        return loss


def build(layers: int = 32, seq_len: int = 2048, **shape: int) -> tuple[nn.Module, Any]:
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336, "vocabulary": 131072, **shape}

    def batch(sequences: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, sizes["vocabulary"], (sequences, length), device=device)
        return {"input_ids": tokens, "labels": tokens}

    return Transformer(layers, seq_len=seq_len, **sizes), batch
