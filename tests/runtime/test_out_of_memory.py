"""An op for which memory was exhausted names its place, what the rank held and the prediction."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import OutOfMemory
from penstock.runtime.out_of_memory import MemoryUse, is_out_of_memory, out_of_memory
from penstock.units import format_bytes


class Greedy(nn.Module):
    """A layer that needs more memory than there is in its second micro-batch."""

    def __init__(self, error):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.forwards, self.error, self.armed = 0, error, False

    def forward(self, x):
        """Raise what torch or Python raises."""
        self.forwards += self.armed
        if self.forwards == 2:
            if self.error is not None:
                raise self.error
            torch.empty(1 << 60)
        return self.linear(x)


@pytest.mark.parametrize(
    "error", [None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried")]
)
def test_the_error_names_stage_op_what_was_held_and_the_prediction(error):
    """The host's allocator, Python and CUDA raise different errors."""
    model = nn.Sequential(nn.Linear(8, 8), Greedy(error))
    profile = ps.analytic(nn.Sequential(*model), torch.zeros(8, 8), device="V100", batch=8)
    plan = ps.plan(
        profile, ps.cluster("local:2"), 8, stages=2, schedules=["gpipe"], micro_batches=4
    )
    model[1].armed = True
    pipe = ps.Pipeline(
        nn.Sequential(*model),
        plan,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        executor="threads",
    )
    with pytest.raises(
        OutOfMemory, match=r"rank 1 \(stage 1\) failed in 1F1 of step 0: out of"
    ) as e:
        pipe.train_batch(torch.ones(8, 8), torch.ones(8, 8))
    text = str(e.value)
    assert re.search(r"the rank held \d+ B of activations", text)
    assert "Use smaller micro-batches" in text
    assert "; the plan predicted " in text
    assert e.value.predicted_bytes == plan.predicted.peak_memory[1]
    assert e.value.held_bytes >= sum(p.nbytes for p in model[1].parameters())


def test_without_a_plan_there_is_no_prediction():
    """The message leaves it out; other errors stay what they were."""
    model = nn.Sequential(nn.Linear(8, 8), Greedy(None))
    model[1].armed = True
    pipe = ps.Pipeline(
        model, loss=nn.functional.mse_loss, balance=[1, 1], micro_batches=4, executor="threads"
    )
    with pytest.raises(OutOfMemory, match=r"gradients and optimizer state\. Use smaller") as e:
        pipe.train_batch(torch.ones(8, 8), torch.ones(8, 8))
    assert e.value.predicted_bytes is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Storage size calculation overflowed with sizes=[9]"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_of_exhausted_memory_are_told_from_others(error, expected):
    """By their type, or by the texts of torch's RuntimeErrors for host memory."""
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("predicted", [None, 0, 2048])
def test_the_message_has_the_first_line_of_the_cause_and_every_amount(predicted):
    """Torch adds a trace of C++ functions in further lines; a MemoryError has no text at all."""
    use = MemoryUse(activations=1024, peak=4096, predicted=predicted)
    for cause, reason in (
        (RuntimeError(" no memory\nframe #0"), "no memory"),
        (MemoryError(), "MemoryError"),
    ):
        error = out_of_memory(cause, (1, 2, "2F3", 4), use)
        prediction = "" if predicted is None else f"; the plan predicted {format_bytes(predicted)}"
        assert str(error).startswith(
            f"rank 1 (stage 2) failed in 2F3 of step 4: out of memory: {reason}; the rank held "
            "1.0 KiB of activations, and at its peak 4.0 KiB with weights, gradients and optimizer "
            f"state{prediction}. Use smaller micro-batches"
        )
        assert (error.held_bytes, error.predicted_bytes) == (4096, predicted)
