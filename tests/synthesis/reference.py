"""The optimum by a model that knows nothing but the rules: no order of micro-batches, no bounds, no
start.
"""

from itertools import combinations, pairwise

from ortools.sat.python import cp_model


def optimum(problem):
    """Least makespan of any program, by CP-SAT, for costs that are whole numbers; two routes are
    chosen per micro-batch.
    """
    routes, c, m = problem.routes, problem.costs, problem.micro_batches
    splits = [[0] * m] if len(routes) == 1 else [[0] * n + [1] * (m - n) for n in range(1, m)]
    return min(_optimum(problem, [routes[way] for way in ways], c) for ways in splits)


def _optimum(problem, homes, c):
    model = cp_model.CpModel()
    stages, m = problem.stages, problem.micro_batches
    f, i, w, b, u, up, down = ([int(x) for x in row] for row in c.seconds)
    most = m * sum(map(sum, (f, i, w, b, up, down))) + sum(u) + 1
    on_rank = [[] for _ in range(problem.ranks)]
    spans = [[] for _ in range(problem.ranks)]
    sends = {}
    ends = {}

    def time():
        return model.new_int_var(0, most, "")

    for n in range(m):
        start = {(kind, s): time() for kind in "FBW" for s in range(stages)}
        end = {}
        for s in range(stages):
            rank = homes[n][s]
            split, turned, released = model.new_bool_var(""), time(), time()
            on_rank[rank].append(model.new_fixed_size_interval_var(start["F", s], f[s], ""))
            on_rank[rank].append(
                model.new_interval_var(start["B", s], b[s] + (i[s] - b[s]) * split, turned, "")
            )
            on_rank[rank].append(
                model.new_optional_fixed_size_interval_var(start["W", s], w[s], split, "")
            )
            model.add(start["W", s] >= turned).only_enforce_if(split)
            model.add(released == start["W", s] + w[s]).only_enforce_if(split)
            model.add(released == turned).only_enforce_if(~split)
            model.add(start["B", s] >= start["F", s] + f[s])
            spans[rank].append(
                (model.new_interval_var(start["F", s], time(), released, ""), int(c.memory[s]))
            )
            end["F", s], end["B", s], ends[s, n] = start["F", s] + f[s], turned, released
        for s, (here, there) in enumerate(pairwise(homes[n])):
            for producer, consumer, link, seconds in (
                (("F", s), ("F", s + 1), (here, there), up[s]),
                (("B", s + 1), ("B", s), (there, here), down[s]),
            ):
                sent = end[producer]
                if here != there:
                    leaves = time()
                    model.add(leaves >= sent)
                    model.add(start[consumer] >= leaves + seconds)
                    sends.setdefault(link, []).append((start[producer], sent, leaves, seconds))
                else:
                    model.add(start[consumer] >= sent)
    for messages in sends.values():
        for (start_a, sent_a, a, for_a), (start_b, sent_b, other, for_b) in combinations(
            messages, 2
        ):
            first = model.new_bool_var("")
            model.add(sent_a <= start_b).only_enforce_if(first)
            model.add(other >= a + for_a).only_enforce_if(first)
            model.add(sent_b <= start_a).only_enforce_if(~first)
            model.add(a >= other + for_b).only_enforce_if(~first)
    makespan = time()
    for s in range(stages):
        update = time()
        for n in range(m):
            model.add(update >= ends[s, n])
        for rank in {row[s] for row in homes}:
            on_rank[rank].append(model.new_fixed_size_interval_var(update, u[s], ""))
        model.add(makespan >= update + u[s])
    for rank, limit in enumerate(problem.limits):
        model.add_no_overlap(on_rank[rank])
        if limit < 10**9:
            model.add_cumulative(
                [span for span, _ in spans[rank]], [hold for _, hold in spans[rank]], int(limit)
            )
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 4
    solver.parameters.max_time_in_seconds = 60
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
