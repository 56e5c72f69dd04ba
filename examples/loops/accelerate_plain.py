"""Train a GPT-2 in a loop with Accelerate, without a pipeline.

Shows: what accelerate_pipe.py starts from.
Story: one epoch over a small text; the loss of every step is printed.
Takes: a few seconds on a CPU.
"""

import torch
from accelerate import Accelerator
from text_model import BATCH, Text, make_model
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Text(), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"{loss.item():.6f}", end=" ")
