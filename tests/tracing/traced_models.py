"""Models with arbitrary forwards, and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block that adds in place, as torchvision's does."""

    def __init__(self, channels, width, stride=1):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and channels == width
        self.down = (
            None
            if same
            else nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Blocks in a list, pooled, flattened, classified."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(3, 4, 3, 1, 1),
            nn.ModuleList([Block(4, 4), Block(4, 8, 2)]),
        )
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class UNet(nn.Module):
    """Skips in a Python list, and a branch on shapes."""

    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.joins = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = functional.relu(down(x))
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = functional.relu(self.middle(x))
        for up, join in zip(self.ups, self.joins, strict=True):
            x, skip = up(x), skips.pop()
            if x.shape != skip.shape:
                x = functional.interpolate(x, size=skip.shape[2:])
            x = functional.relu(join(torch.cat([skip, x], 1)))
        return self.head(x)


class Translator(nn.Module):
    """Two inputs, an optional mask, a number, a flag, tied weights, and a dict with tuples as
    output.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 11)
        self.out.weight = self.embedding.weight

    def forward(self, source, target, mask=None, scale=1.0, *, whole=False):
        memory, state = self.encoder(self.embedding(source))
        inner, _ = self.decoder(self.embedding(target), state)
        read, weights = self.attention(inner, memory, memory, key_padding_mask=mask)
        outputs = {"logits": self.out(inner + read * scale), "kind": "translation", "none": None}
        return {**outputs, "inside": (weights, [state])} if whole else outputs


class Statistics(nn.Module):
    """Buffers changed in place and replaced, parameters of its own, a tensor that many layers use,
    and a detached one.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 6)
        self.branches = nn.ModuleList(
            [nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6)]) for _ in range(3)]
        )
        self.gates = nn.ParameterList([nn.Parameter(torch.full((6,), 1.0 + i)) for i in range(3)])
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 2)})
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.table = torch.arange(6.0)

    def forward(self, x):
        inner = first = self.stem(x)
        for (linear, norm), gate in zip(self.branches, self.gates, strict=True):
            inner = norm(functional.gelu(linear(inner))) * gate + first + self.table
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inner.detach().mean(0)
            with torch.no_grad():
                self.steps += 1
        return {
            "a": self.heads["a"](inner),
            "b": self.heads["b"](inner.data * 2 + first),
            "samples": x.shape[0],
        }


class Checkpointed(nn.Module):
    """Blocks that are recomputed, in both of torch's ways."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.blocks[0](x)
        for reentrant, block in zip((False, True), self.blocks[1:], strict=True):
            x = x + (checkpoint(block, x, use_reentrant=reentrant) if self.training else block(x))
        return self.head(x)


class Doubled(torch.autograd.Function):
    """Rounds, and doubles the gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Rounded(nn.Module):
    """An autograd.Function, and parts without gradients."""

    def __init__(self):
        super().__init__()
        self.frozen, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.second(Doubled.apply(self.first(x) * 3, 2.0))


class Shared(nn.Module):
    """One module called three times, a view changed in place, and a tensor changed before a cut."""

    def __init__(self):
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        inner = self.first(x)
        for _ in range(2):
            inner = torch.tanh(self.cell(inner))
        inner = inner * 1.5
        part = inner[:, :2]
        more = self.cell(self.first(x))
        part.mul_(2)
        return self.last(inner + more), part


class Transformer(nn.Module):
    """torch's own, with a causal mask of the target's length."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.out(
            self.body(
                self.embedding(source) * math.sqrt(8),
                self.embedding(target),
                tgt_mask=mask,
                tgt_is_causal=True,
            )
        )


@dataclass
class Result:
    """An output that torch does not flatten."""

    scores: torch.Tensor
    parts: list
    kind: str = "result"


class Returning(nn.Module):
    """Returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        inner = self.first(x)
        return Result(self.second(inner), [inner, None])


def tokens(samples, length):
    return torch.randint(0, 11, (samples, length))


def keywords(samples, length):
    """Return inputs of the translator by name, with a mask for the last token."""
    mask = torch.arange(length).expand(samples, length) == length - 1
    return {
        "source": tokens(samples, length),
        "target": tokens(samples, length - 1),
        "mask": mask,
        "scale": 0.5,
        "whole": True,
    }


MODELS = {
    "resnet": (ResNet, lambda samples, _: torch.randn(samples, 3, 8, 8)),
    "unet": (UNet, lambda samples, _: torch.randn(samples, 3, 8, 8)),
    "translator by keywords": (Translator, keywords),
    "statistics": (Statistics, lambda samples, _: torch.randn(samples, 8)),
    "checkpointed": (Checkpointed, lambda samples, _: torch.randn(samples, 8)),
    "rounded": (Rounded, lambda samples, _: torch.randn(samples, 8)),
    "shared": (Shared, lambda samples, _: torch.randn(samples, 8)),
    "transformer": (
        Transformer,
        lambda samples, length: (tokens(samples, length), tokens(samples, length - 1)),
    ),
    "returning": (Returning, lambda samples, _: torch.randn(samples, 8)),
}
