"""Optimizers by name, for configurations and flags."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.optim.update import OptimizerFactory
from penstock.training.config import TrainConfig


def optimizer_factory(config: TrainConfig) -> OptimizerFactory:
    """From a stage's parameters to its optimizer, as the configuration says."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay)
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, config.lr, weight_decay=config.weight_decay)

    return make
