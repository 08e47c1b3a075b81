"""A GPT on random tokens, by default with about 4 million parameters and 1,024 tokens a step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from training import Training, make_steady, serve


@dataclass(frozen=True)
class Size:
    vocab: int = 1000
    width: int = 224
    layers: int = 6
    heads: int = 7
    length: int = 128
    batch: int = 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size.vocab, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def make_training(size: Size | None = None) -> Training:
    make_steady()
    size = size or Size()
    shape, model = (size.batch, size.length + 1), GPT(size)

    def loss(tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    batches = iter(lambda: (torch.randint(0, size.vocab, shape),), None)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), batches, loss)


if __name__ == "__main__":
    serve(make_training())
