"""Train a GPT-2 by the Trainer of transformers, without a pipeline.

Shows: what trainer_pipe.py starts from.
Story: one epoch over a small text; the loss of every step is printed.
Takes: a few seconds on a CPU.
"""

import tempfile

from text_model import BATCH, Text, make_model
from transformers import Trainer, TrainingArguments

model = make_model()
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
)
trainer = Trainer(model=model, args=arguments, train_dataset=Text())
trainer.train()
print(*(f"{row['loss']:.6f}" for row in trainer.state.log_history if "loss" in row))
