"""Compare schedules by simulation, before anything runs.

Shows: schedule, simulate, verify, draw.
Story: four equal stages, eight micro-batches, and hops that take a tenth of a forward. 1F1B is not
    faster than GPipe: it takes as long without hops, and a little longer with them. But rank 0
    saves the activations of half as many micro-batches.
Takes: less than a second, no GPU, no torch.
"""

import penstock as ps

STAGES = 4
MICRO_BATCHES = 8

# Seconds per micro-batch and stage; bytes that a stage saves of a micro-batch from its forward to
# its backward.
COSTS = ps.Costs(forward=0.010, backward=0.020, transfer=0.001, activation_bytes=50 * 2**20)

print(
    f"{'schedule':<10}{'makespan':>10}{'bubble':>9}{'in flight':>13}{'activations on rank 0':>24}"
)
for name in ("naive", "gpipe", "1f1b"):
    schedule = ps.schedule(name, stages=STAGES, micro_batches=MICRO_BATCHES)
    timeline = ps.simulate(schedule, COSTS)
    in_flight = " ".join(map(str, ps.verify(schedule).peak_in_flight))
    megabytes = timeline.peak_memory[0] / 2**20
    print(
        f"{name:<10}{timeline.makespan * 1000:>7.0f} ms{timeline.bubble_ratio:>9.1%}{in_flight:>13}{megabytes:>20.0f} MiB"
    )

print()
print(ps.draw(timeline, width=100))
