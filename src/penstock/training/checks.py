"""Check a run's settings for consistency before anything is measured."""

from __future__ import annotations

import torch
from torch import nn

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.optim.catalogue import stage_weights
from penstock.optim.stage_weights import Site
from penstock.optim.update import Update
from penstock.option import options_of
from penstock.partition.catalogue import PARTITIONERS, check_lengths, check_stages
from penstock.schedule.catalogue import FAMILIES, schedule, schedules
from penstock.schedule.op import Schedule
from penstock.search.request import MICRO_BATCHES
from penstock.training.config import TrainConfig
from penstock.training.optimizer import optimizer_factory, scales_loss
from penstock.units import parse_bytes
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.compatibility import mismatch_message, rule_of, schedule_for
from penstock.weights.rule_types import Reads
from penstock.weights.weight_uses import Use, readings

#: Numbers of stages that are tried if the planner chooses theirs.
_EXAMPLE_STAGES = (1, 2, 4)


def check_settings(config: TrainConfig, layers: int) -> None:
    """Refuse settings that planning or training would refuse only after the measurement.

    Args:
        config: of the run.
        layers: of the model.

    Raises:
        PenstockError: of the kind that planning or training would raise.
    """
    partition = config.lengths()
    if isinstance(partition, list):
        check_lengths(partition, layers, config.stage_count())
    else:
        PARTITIONERS.find(partition.partition(":")[0])
        check_stages(layers, config.stage_count() or 1)
    _check_asynchrony(config)
    if config.memory_limit is not None:
        parse_bytes(config.memory_limit)


def _check_asynchrony(config: TrainConfig) -> None:
    """Refuse a schedule, a weight rule and an optimizer that are incompatible.

    Raises:
        UnknownName, PlanError, ScheduleError, SettingError: the message gives the reason.
    """
    name = _schedule_name(config)
    facts = None if name is None else schedules()[FAMILIES.find(name).name]
    rule = weight_rule(config.weights or (facts.weights if facts is not None else "flush"))
    _check_global_options(config, synchronous=rule.synchronous and not config.asynchronous)
    if facts is None:
        # With `asynchronous` and no schedule, the planner chooses the weight rule.
        if not config.asynchronous:
            _check_optimizer(config, rule)
        return
    if facts.synchronous != rule.synchronous:
        raise PlanError(mismatch_message(rule.name, facts.name, facts.synchronous))
    _check_optimizer(config, rule)
    if not rule.synchronous:
        _check_numbers(config, facts.name, rule)


def _check_optimizer(config: TrainConfig, rule: WeightRule) -> None:
    """Refuse an optimizer or options that the weight rule does not support."""
    options = rule.with_defaults(config.weights_options)
    if not rule.optimizers:
        return  # the rule supports all optimizers
    # The rule's own constructor refuses; that needs an optimizer, and any parameter.
    update = Update.make([nn.Parameter(torch.zeros(1))], optimizer_factory(config))

    def any_use(number: int) -> Use:
        """Return some use of the weights: the check depends on the optimizer alone."""
        return Use(number, 0, Reads(number, number), number, True, True)

    stage_weights(Site(update, any_use, rule, options))


def _check_global_options(config: TrainConfig, *, synchronous: bool) -> None:
    """Refuse options that need the gradients of all stages at once in asynchronous training.

    Raises:
        SettingError: such an option is set.
    """
    if synchronous:
        return
    names = [
        entry.name
        for entry, facts in options_of(config)
        if facts.needs_synchronous(getattr(config, entry.name), entry.default)
    ]
    if scales_loss(config):
        names.append("autocast float16, which scales the loss,")
    if names:
        raise SettingError(
            f"{names[0]} needs a schedule whose stages update together, and this run's is "
            "asynchronous, or may be: choose a synchronous one, or leave the option out"
        )


def _check_numbers(config: TrainConfig, name: str, rule: WeightRule) -> None:
    """Refuse an asynchronous schedule that is incompatible with the weight rule at all numbers.

    These are the numbers of stages and micro-batches that are set, or examples where they are not.
    """
    stages = config.stage_count()
    stage_counts = _EXAMPLE_STAGES if stages is None else (stages,)
    micro_batch_counts = MICRO_BATCHES
    if config.micro_batches is not None:
        micro_batch_counts = (config.micro_batches,)
    errors: list[ScheduleError] = []
    for stage_count in stage_counts:
        for micro_batches in micro_batch_counts:
            try:
                candidate = schedule(name, stage_count, micro_batches)
                readings(candidate, rule_of(candidate, rule, config.weights_options))
            except ScheduleError as error:
                errors.append(error)
            else:
                return
    raise errors[-1]


def _schedule_name(config: TrainConfig) -> str | None:
    """Return the schedule's name, from the settings or from the weight rule that implies one.

    None if the planner chooses it.
    """
    if config.schedule is None and config.weights is not None and not config.asynchronous:
        if weight_rule(config.weights).synchronous:
            return None
        return schedule_for(config.weights)
    return config.schedule


def known_schedule(config: TrainConfig) -> Schedule | None:
    """Return the schedule if the settings determine it completely, else None."""
    name, stages = _schedule_name(config), config.stage_count()
    if name is None or stages is None or config.micro_batches is None:
        return None
    return schedule(name, stages, config.micro_batches)
