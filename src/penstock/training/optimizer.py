"""Optimizers and other options of a `Pipeline`, from a training configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.optim.update import OptimizerFactory
from penstock.training.config import TrainConfig


def optimizer_factory(config: TrainConfig) -> OptimizerFactory:
    """Return the function that makes a stage's optimizer from its parameters."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        """Make the optimizer of a stage."""
        if config.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, config.lr, config.momentum, weight_decay=config.weight_decay
            )
        optimizer_class = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return optimizer_class(parameters, config.lr, weight_decay=config.weight_decay)

    return make


def sample_optimizer(config: TrainConfig) -> Optimizer:
    """Return an optimizer with the options of every stage's, over a single parameter."""
    return optimizer_factory(config)([nn.Parameter(torch.zeros(1))])


def training_options(config: TrainConfig) -> dict[str, Any]:
    """Return keyword arguments of `Pipeline` beyond schedule, loss and optimizer."""
    return {
        "clip_grad_norm": config.clip_grad_norm,
        "autocast": autocast_dtype(config),
        "scaler": config.autocast == "float16",
        "accumulate": config.accumulate,
        "compile": config.compile,
    }


def autocast_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype of mixed precision; None if it is off."""
    return None if config.autocast is None else getattr(torch, config.autocast)
