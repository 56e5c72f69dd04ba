"""A tiny GPT-2 and the text that comes with Python, for the training loops in this folder.

Shows: nothing of Penstock; the loops share this file.
Story: characters of Python's language reference are the tokens. Dropout is off, so that a pipeline
    and plain training can be compared number by number.
Takes: a second.
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, SAMPLES, BATCH = 32, 64, 16


class Text(Dataset):
    """Windows of the text: a dict of `input_ids` and `labels`, int64 (TOKENS,)."""

    def __init__(self) -> None:
        text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        codes = torch.tensor(list(text[: SAMPLES * TOKENS]))
        self.windows = codes.view(SAMPLES, TOKENS)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def make_model() -> GPT2LMHeadModel:
    """Return a GPT-2 of two blocks, the same at every call."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": TOKENS, "vocab_size": 128}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **ends))
