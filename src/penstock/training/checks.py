"""What a run is asked to do, held against itself before anything is measured."""

from __future__ import annotations

import torch
from torch import nn

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.optim.catalogue import stage_weights
from penstock.optim.stage_weights import Site
from penstock.optim.update import Update
from penstock.partition.catalogue import PARTITIONERS, check_lengths, check_stages
from penstock.schedule.catalogue import FAMILIES, schedule, schedules
from penstock.schedule.op import Schedule
from penstock.search.request import MICRO_BATCHES
from penstock.training.config import TrainConfig
from penstock.training.optimizer import optimizer_factory
from penstock.units import parse_bytes
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.choice import does_not_go, rule_of, schedule_for
from penstock.weights.reads import Reads
from penstock.weights.uses import Use, readings

#: Numbers of stages that stand for all, where theirs is the planner's choice.
_SOME_STAGES = (1, 2, 4)


def check_words(config: TrainConfig, layers: int) -> None:
    """Refuse before anything is measured what would be refused after it."""
    cut = config.lengths()
    if isinstance(cut, list):
        check_lengths(cut, layers, config.stage_count())
    else:
        PARTITIONERS.find(cut.partition(":")[0])
        check_stages(layers, config.stage_count() or 1)
    if config.micro_batches is not None and config.micro_batches > config.batch:
        raise SettingError(
            f"a batch of {config.batch} cannot be cut into {config.micro_batches} micro-batches"
        )
    _check_asynchrony(config)
    if config.memory_limit is not None:
        parse_bytes(config.memory_limit)


def _check_asynchrony(config: TrainConfig) -> None:
    """Refuse a schedule, a weight rule and an optimizer that do not go together.

    Raises:
        UnknownName, PlanError, ScheduleError, SettingError: they do not; the message says why.
    """
    name = _schedule_name(config)
    facts = None if name is None else schedules()[FAMILIES.find(name).name]
    rule = weight_rule(config.weights or (facts.weights if facts is not None else "flush"))
    _check_together(config, synchronous=rule.synchronous and not config.asynchronous)
    if facts is not None and facts.synchronous != rule.synchronous:
        raise PlanError(does_not_go(rule.name, facts.name, facts.synchronous))
    if not (config.asynchronous and facts is None):
        options = rule.with_defaults(config.weights_options)
        if rule.optimizers:  # others take all
            update = Update.make([nn.Parameter(torch.zeros(1))], optimizer_factory(config))
            # Numbers do not matter: it looks at the optimizer and refuses, or not.
            stage_weights(
                Site(
                    update,
                    lambda number: Use(number, 0, Reads(number, number), number, True, True),
                    rule,
                    options,
                )
            )
    if facts is not None and not rule.synchronous:
        _check_numbers(config, facts.name, rule)


def _check_together(config: TrainConfig, *, synchronous: bool) -> None:
    """Refuse what needs the gradients of all stages at once where these update at different times,
    or may do so.

    Raises:
        SettingError: that is so.
    """
    asked = {
        "clip_grad_norm": config.clip_grad_norm is not None,
        "accumulate": config.accumulate > 1,
        "autocast float16, which scales the loss,": config.autocast == "float16",
    }
    for name, wish in asked.items():
        if wish and not synchronous:
            raise SettingError(
                f"{name} needs a schedule whose stages update together, and this run's is asynchronous, or may be: take a "
                "synchronous one, or leave it out"
            )


def _check_numbers(config: TrainConfig, name: str, rule: WeightRule) -> None:
    """Refuse an asynchronous schedule that the weight rule goes with at none of the numbers that
    are asked for or left open.
    """
    stages = config.stage_count()
    refused: list[ScheduleError] = []
    for count in _SOME_STAGES if stages is None else (stages,):
        for micro_batches in (
            MICRO_BATCHES if config.micro_batches is None else (config.micro_batches,)
        ):
            try:
                made = schedule(name, count, micro_batches)
                readings(made, rule_of(made, rule.name, config.weights_options))
            except ScheduleError as error:
                refused.append(error)
            else:
                return
    raise refused[-1]


def _schedule_name(config: TrainConfig) -> str | None:
    """The schedule asked for, by its name or by that of its weight rule; None where it is the
    planner's choice.
    """
    if config.schedule is None and config.weights is not None and not config.asynchronous:
        return schedule_for(config.weights) if not weight_rule(config.weights).synchronous else None
    return config.schedule


def known_schedule(config: TrainConfig) -> Schedule | None:
    """The schedule, where all of its numbers are asked for."""
    name, stages = _schedule_name(config), config.stage_count()
    if name is None or stages is None or config.micro_batches is None:
        return None
    return schedule(name, stages, config.micro_batches)
