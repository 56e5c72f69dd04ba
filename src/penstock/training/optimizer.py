"""Optimizers and other options of a `Pipeline`, from a training configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.optim.update import OptimizerFactory
from penstock.option import common_values
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


def pipeline_options(config: TrainConfig) -> dict[str, Any]:
    """Return the keyword arguments of `Pipeline` that a configuration determines."""
    return {
        "optimizer": optimizer_factory(config),
        "seed": config.seed,
        "deadline_s": config.deadline_s,
        "scaler": scales_loss(config),
        **common_values(config),
    }


def scales_loss(config: TrainConfig) -> bool:
    """Whether the loss is scaled, because gradients may underflow."""
    return config.autocast == "float16"


def autocast_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype of mixed precision; None if it is off."""
    return None if config.autocast is None else getattr(torch, config.autocast)
