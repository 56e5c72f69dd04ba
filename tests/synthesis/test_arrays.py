"""Sizes of encoded programs and of the workspace."""

from __future__ import annotations

import numpy as np
import pytest
from tests.synthesis.requests import problem_of, random_counts, random_problem

from penstock.simulate.costs import Costs
from penstock.synthesis.arrays import empty_encoding, make_workspace, max_ops
from penstock.synthesis.problem import Constraints


def test_programs_have_space_for_three_ops_of_each_micro_batch_of_every_copy():
    """The rank with most sets the length of all; with two routes the numbers on them count."""
    for seed in range(40):
        problem = random_problem(seed)
        spec = problem.spec(random_counts(problem, np.random.default_rng(seed)))
        ops = [
            sum(3 * int(spec.counts[copy // problem.stages]) for copy in copies)
            for copies in problem.copies_of_rank
        ]
        assert max_ops(spec) == max(ops)
        encoding = empty_encoding(spec)
        assert encoding.codes.shape == (problem.ranks, max(ops))
        assert encoding.lengths.tolist() == [0] * problem.ranks


def test_a_single_rank_has_space_for_the_ops_of_all_its_stages():
    """Copy 0 counts as all others."""
    for stages, placement, options in ((1, "linear", {}), (4, "interleaved", {"ranks": 1})):
        costs = Costs(forward=(1.0,) * stages)
        problem = problem_of(costs, 5, Constraints(placement, **options))
        assert max_ops(problem.spec((5,))) == 3 * 5 * stages


@pytest.mark.parametrize("counts", [(4, 1), (1, 4)])
def test_a_workspace_has_an_entry_per_op_copy_micro_batch_and_link(counts):
    """Inputs of both directions have an entry for the route with most micro-batches."""
    problem = random_problem(1, "bidirectional", 5)
    spec = problem.spec(counts)
    work, ranks, copies = make_workspace(spec), problem.ranks, 2 * problem.stages
    for array in (work.start, work.cause):
        assert array.shape == (ranks, max_ops(spec))
    for array in (work.arrive, work.maker):
        assert array.shape == (2, copies, 4)
    assert work.done.shape == (copies, 4)
    assert work.free.shape == (ranks,)
    assert work.link.shape == work.busy.shape == (ranks, ranks)
    assert work.turn.shape == (ranks, 3)
