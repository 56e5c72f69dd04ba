"""Use a pipeline in a training loop that calls `backward()`, on two threads of a CPU.

Shows: Pipe, skippable, stash, pop, Namespace, deferred batch norm.
Story: a small U-Net with batch norm learns to find the outline of a disc. Its skips cross the cut
    between two partitions. Its gradients equal those of the plain model, which runs the same
    micro-batches here. Afterwards the plain model loads the trained weights.
Takes: a few seconds on a CPU.
"""

from collections.abc import Generator

import torch
from torch import nn
from torch.nn import functional

import penstock as ps

#: Type of a forward that yields stashes and pops.
Skips = Generator[object, torch.Tensor, torch.Tensor]

IMAGES, SIZE, MICRO_BATCHES = 32, 16, 4

torch.set_num_threads(2)  # one for each partition
torch.manual_seed(0)


@ps.skippable(stash=["skip"])
class Down(nn.Module):
    """Halve the image, and stash the input for the layer that doubles it again."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, wider, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(wider)

    def forward(self, x: torch.Tensor) -> Skips:
        """Stash, convolve, normalise."""
        yield ps.stash("skip", x)
        return torch.relu(self.norm(self.conv(x)))


@ps.skippable(pop=["skip"])
class Up(nn.Module):
    """Double the image, and concatenate the stashed tensor."""

    def __init__(self, channels: int, skip_channels: int, narrower: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels + skip_channels, narrower, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Skips:
        """Enlarge, pop, convolve."""
        skip_channels = yield ps.pop("skip")
        return self.conv(
            torch.cat([functional.interpolate(x, scale_factor=2), skip_channels], dim=1)
        )


def make_model() -> nn.Sequential:
    """Return a U-Net with two skips of the same name in two namespaces."""
    outer, inner = ps.Namespace(), ps.Namespace()
    return nn.Sequential(
        Down(1, 8).isolate(outer),
        Down(8, 16).isolate(inner),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        Up(16, 8, 8).isolate(inner),
        nn.ReLU(),
        Up(8, 1, 1).isolate(outer),
    )


def make_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return discs of several sizes, and masks of their outlines."""
    row = torch.arange(SIZE, dtype=torch.float32) - SIZE / 2
    distance = (row[:, None] ** 2 + row**2).sqrt()
    radius = torch.rand(IMAGES, 1, 1, 1) * 4 + 3
    return (distance < radius).float(), ((distance - radius).abs() < 1).float()


plain = make_model()
model = ps.Pipe(
    make_model(),
    balance=[3, 4],
    devices=2,
    chunks=MICRO_BATCHES,
    checkpoint="always",
    deferred_batch_norm=True,
)
model.load_state_dict(plain.state_dict())
x, y = make_images()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return the loss of the predicted outlines."""
    return functional.binary_cross_entropy_with_logits(output, y)


loss_of(model(x)).backward()
loss_of(torch.cat([plain(part) for part in x.chunk(MICRO_BATCHES)])).backward()
same = all(
    torch.allclose(a.grad, b.grad, atol=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True)
)
print("gradients are those of the plain model:", "yes" if same else "no")

optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(40):
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} batches")

plain.load_state_dict(model.sequential_state_dict())
with torch.no_grad():
    agree = torch.allclose(plain.eval()(x), model.eval()(x), atol=1e-5)
print("the plain model has the trained weights:", "yes" if agree else "no")
print("batches counted by batch norm:", int(plain[0].norm.num_batches_tracked))
