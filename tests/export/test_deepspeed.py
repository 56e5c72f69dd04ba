"""DeepSpeed's parts."""

import ast

import pytest

from penstock.errors import PlanError
from penstock.export.catalogue import export, exported
from penstock.schedule.catalogue import schedule

LINEAR = (3, 4, 5, 3)


class Planned:
    """What DeepSpeed's PipelineModule does with `parts`, on one rank: half-open ranges of layers
    (module.py, `_set_bounds`).
    """

    def __init__(self, parts: list[int], stage: int) -> None:
        self._local_start, self._local_stop = parts[stage], parts[stage + 1]

    def layers(self, all_layers: tuple[str, ...]) -> tuple[str, ...]:
        """The layers that the rank builds."""
        return tuple(
            layer for i, layer in enumerate(all_layers) if self._local_start <= i < self._local_stop
        )


def test_every_rank_builds_the_plans_layers(plan_of):
    """Bounds are half-open, one more than there are stages."""
    chosen_plan = plan_of(schedule("1f1b", 4, 8), LINEAR)
    parts = ast.literal_eval(export(chosen_plan, "deepspeed"))
    assert parts == [0, 3, 7, 12, 15]
    built = [Planned(parts, stage).layers(chosen_plan.layer_names) for stage in range(4)]
    assert built == [chosen_plan.layer_names[start:end] for start, end in chosen_plan.bounds]


def test_the_configuration_has_micro_batches_of_one_pipeline(plan_of):
    """There a batch is pipelines x accumulation steps x micro-batch."""
    result = exported(plan_of(schedule("1f1b", 4, 8, replicas=2), LINEAR, batch=48), "deepspeed")
    assert '"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 6' in result.use
    assert any('axes=["data", "pipe"], dims=[2, 4]' in note for note in result.left_out)


def test_a_uniform_cut_exports_as_the_method_uniform(plan_of):
    """Then no subclass is needed."""
    assert (
        'partition_method="uniform"'
        in exported(plan_of(schedule("1f1b", 4, 8), (4, 4, 4, 3)), "deepspeed").use
    )
    assert (
        'partition_method="uniform"'
        not in exported(plan_of(schedule("1f1b", 4, 8), LINEAR), "deepspeed").use
    )


def test_several_stages_on_a_rank_are_refused(plan_of):
    """A rank has one range of layers."""
    with pytest.raises(PlanError, match="interleaved has 8 stages on 4 ranks"):
        export(plan_of(schedule("interleaved", 8, 8), (2, 2, 2, 2, 2, 2, 2, 1)), "deepspeed")


def test_recompute_exports_as_an_interval(plan_of):
    """The interval is that of the longest stage; the last micro-batch is no exception in DeepSpeed."""
    result = exported(plan_of(schedule("1f1b", 4, 8), LINEAR, recompute="except_last"), "deepspeed")
    assert result.left_out == (
        "recomputation: activation_checkpoint_interval=5 recomputes every stage whole for the last micro-batch too",
    )


def test_deepspeed_itself_gives_every_rank_the_plans_layers(plan_of):
    """Its topology and bounds are used if it is installed; a whole PipelineModule needs a process
    group and a compiler.
    """
    pytest.importorskip("deepspeed")
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology
    from torch import nn

    chosen_plan = plan_of(schedule("1f1b", 4, 8, replicas=2), LINEAR)
    bounds = ast.literal_eval(export(chosen_plan, "deepspeed"))

    class AsDocumented(PipelineModule):
        """The recipe of the exporter's docstring."""

        def _partition_layers(self, method="uniform"):
            self.parts = bounds
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    for rank, (stage,) in enumerate(chosen_plan.schedule.stages_of_rank):
        module = AsDocumented.__new__(AsDocumented)
        nn.Module.__init__(module)
        module._topo, module.global_rank = ProcessTopology(axes=["data", "pipe"], dims=[2, 4]), rank
        module._layer_specs = list(chosen_plan.layer_names)
        module._partition_layers()
        assert (module._local_start, module._local_stop) == chosen_plan.bounds[stage]
