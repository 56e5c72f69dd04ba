"""Optimizers by name, and what else of training a configuration says, as a Pipeline takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.optim.update import OptimizerFactory
from penstock.training.config import TrainConfig


def optimizer_factory(config: TrainConfig) -> OptimizerFactory:
    """From a stage's parameters to its optimizer, as the configuration says."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        if config.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, config.lr, config.momentum, weight_decay=config.weight_decay
            )
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, config.lr, weight_decay=config.weight_decay)

    return make


def an_optimizer(config: TrainConfig) -> Optimizer:
    """An optimizer as every stage will have one, over a single number."""
    return optimizer_factory(config)([nn.Parameter(torch.zeros(1))])


def training_options(config: TrainConfig) -> dict[str, Any]:
    """Keywords of `Pipeline` beyond schedule, loss and optimizer."""
    return {
        "clip_grad_norm": config.clip_grad_norm,
        "autocast": autocast_dtype(config),
        "scaler": config.autocast == "float16",
        "accumulate": config.accumulate,
        "compile": config.compile,
    }


def autocast_dtype(config: TrainConfig) -> torch.dtype | None:
    """The dtype of mixed precision."""
    return None if config.autocast is None else getattr(torch, config.autocast)
