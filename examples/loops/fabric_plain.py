"""Train a GPT-2 in a loop with Lightning Fabric, without a pipeline.

Shows: what fabric_pipe.py starts from.
Story: one epoch over a small text; the loss of every step is printed.
Takes: a few seconds on a CPU.
"""

import torch
from lightning_fabric import Fabric
from text_model import BATCH, Text, make_model
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=1)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(Text(), batch_size=BATCH))
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    print(f"{loss.item():.6f}", end=" ")
