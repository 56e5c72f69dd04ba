"""Train a GPT-2 by the Trainer of transformers, as a pipeline of two partitions.

Shows: Pipe with a traced model, in a loop that computes the loss from the outputs.
Story: the losses are those of trainer_plain.py; the lines that differ are few. A Pipe returns the
    outputs of the whole batch, and Trainer computes from them the loss that the model would have.
Takes: a few seconds on a CPU.
"""

import tempfile

from text_model import BATCH, Text, make_model
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import penstock as ps


def token_loss(outputs, labels, **count):
    return ForCausalLMLoss(outputs.logits, labels, 128, **count)


model = make_model()
example = {"input_ids": Text()[0]["input_ids"].expand(2, -1)}
model = ps.Pipe(model, balance=[8, 8], chunks=4, devices=["cpu"] * 2, example=example)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    num_train_epochs=1,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    remove_unused_columns=False,
    label_names=["labels"],
)
trainer = Trainer(model=model, args=arguments, train_dataset=Text(), compute_loss_func=token_loss)
trainer.train()
print(*(f"{row['loss']:.6f}" for row in trainer.state.log_history if "loss" in row))
