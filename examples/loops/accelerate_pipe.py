"""Train a GPT-2 in a loop with Accelerate, as a pipeline of two partitions.

Shows: Pipe with a traced model, in a loop that calls backward through Accelerate.
Story: the losses are those of accelerate_plain.py; the lines that differ are few. A Pipe returns the
    outputs of the whole batch, and the loop computes from them the loss that the model would have.
Takes: a few seconds on a CPU.
"""

import torch
from accelerate import Accelerator
from text_model import BATCH, Text, make_model
from torch.utils.data import DataLoader
from transformers.loss.loss_utils import ForCausalLMLoss

import penstock as ps

accelerator = Accelerator(cpu=True)
model = make_model()
example = {"input_ids": Text()[0]["input_ids"].expand(2, -1)}
model = ps.Pipe(model, balance=[8, 8], chunks=4, devices=["cpu"] * 2, example=example)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Text(), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = ForCausalLMLoss(model(input_ids=batch["input_ids"]).logits, batch["labels"], 128)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"{loss.item():.6f}", end=" ")
