"""Train a model that is not an nn.Sequential: with skips, several inputs, a mask and a tied head.

Shows: chain with an example, layers and what crosses between them, Pipeline,
    compare_with_one_device.
Story: a small translator in plain PyTorch is traced and cut into a layer for every
    module with weights. Three ranks train it, also with batches of other lengths than the
    example. Its parameters get the gradients of plain training.
Takes: some seconds on a CPU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps

torch.set_num_threads(1)
torch.manual_seed(0)


class Translator(nn.Module):
    """Encode a source sentence, and predict the next word of the target."""

    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.reads = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 64, batch_first=True) for _ in range(2)]
        )
        self.writes = nn.ModuleList(
            [nn.TransformerDecoderLayer(width, 4, 64, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the scores of all words at every position of the target."""
        padding = source == 0
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.embedding(source)
        for layer in self.reads:
            memory = layer(memory, src_key_padding_mask=padding)
        value = self.embedding(target)
        for layer in self.writes:
            value = layer(value, memory, tgt_mask=later, memory_key_padding_mask=padding)
        return {"scores": self.head(value), "read": memory.mean(dim=1)}


def batch(samples: int, words: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs by name, with the target shifted by one, and the target."""
    tokens = torch.randint(1, 50, (samples, words))
    return {"source": tokens.flip(1), "target": tokens.roll(1, 1)}, tokens


model = Translator()
x, y = batch(4, 7)
chain = ps.chain(model, x)
print(
    f"{chain.parameter_count:,} parameters in {len(chain)} layers, among them",
    ", ".join(layer.name for layer in list(chain)[:4]),
)
tied = {}
for name, users in chain.description.tied.items():
    tied[name] = [chain[user].name for user in users]
print("tied weights:", tied)

third = len(chain) // 3
pipe = ps.Pipeline(
    chain,
    loss=lambda output, tokens: functional.cross_entropy(
        output["scores"].flatten(0, 1), tokens.flatten()
    ),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.003),
    balance=[third, third, len(chain) - 2 * third],
    schedule="1f1b",
    micro_batches=4,
    executor="threads",
    device="cpu",
)
difference = max(pipe.compare_with_one_device(x, y).gradients.values())
print(
    "gradients are those of plain training:",
    "yes" if difference < 1e-6 else f"no, off by {difference:g}",
)

examples = [batch(8, words) for words in (7, 5)]
stream = pipe.train(examples[step % 2] for step in range(24))
losses = [float(loss) for loss in stream]
print(
    f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} batches of 7 and 5 words"
)
print(
    "the same names in its state:",
    "yes" if set(pipe.state_dict()) == set(model.state_dict()) else "no",
)
pipe.close()
