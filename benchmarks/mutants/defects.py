"""Hand-made defects in the core, and the tests that mirror the defective file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A replacement of text in one file.

    Attributes:
        what: the defect in a few words.
        file: under src/penstock.
        old: text that occurs in the file once.
        new: what stands there instead.
        tests: paths from the root of the repository, in the order in which they run.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAMILIES = "tests/schedule/families"
RUNTIME = tuple(
    f"tests/runtime/{name}.py"
    for name in (
        "test_interpreter",
        "test_streaming",
        "test_pipeline",
        "test_optimizers",
        "comparison/test_one_device_comparison",
    )
)
STAGE = ("tests/stage/test_released_activations.py", "tests/stage")

DEFECTS = [
    # Schedules and their transfers.
    Defect(
        "gpipe: backward order swapped",
        "schedule/families/gpipe.py",
        'if backward_order == "forward" else',
        'if backward_order != "forward" else',
        (f"{FAMILIES}/test_gpipe.py",),
    ),
    Defect(
        "1f1b: last forward dropped from the steady state",
        "schedule/families/one_f_one_b.py",
        "if ahead + place < len(micro_batches):",
        "if ahead + place < len(micro_batches) - 1:",
        (f"{FAMILIES}/test_one_f_one_b.py",),
    ),
    Defect(
        "1f1b: a warm-up that deadlocks is accepted",
        "schedule/families/one_f_one_b.py",
        "if ahead[stage] > ahead[stage - 1]:",
        "if ahead[stage] > ahead[stage - 1] + 1:",
        (f"{FAMILIES}/test_one_f_one_b.py",),
    ),
    Defect(
        "zb-h1: one warm-up forward less",
        "schedule/families/zero_bubble.py",
        "ahead=stages - stage, lag=stage)",
        "ahead=max(1, stages - stage - 1), lag=stage)",
        (f"{FAMILIES}/test_zero_bubble.py",),
    ),
    Defect(
        "zero bubble: W one micro-batch late",
        "schedule/families/zero_bubble.py",
        "        if m >= lag:\n            ops.append(Op(Kind.W, stage, m - lag))",
        "        if m > lag:\n            ops.append(Op(Kind.W, stage, m - lag - 1))",
        (f"{FAMILIES}/test_zero_bubble.py",),
    ),
    Defect(
        "interleaved: warm-up two forwards longer",
        "schedule/families/interleaved.py",
        "2 * (ranks - rank - 1) + (chunks - 1)",
        "2 * (ranks - rank) + (chunks - 1)",
        (f"{FAMILIES}/test_interleaved.py",),
    ),
    Defect(
        "lower: receives of a link may overtake each other",
        "schedule/lower.py",
        "latest = min(latest, max(0, consumer - ahead))",
        "latest = max(0, consumer - ahead)",
        ("tests/schedule/test_lower.py",),
    ),
    Defect(
        "lower: receives are posted one op late",
        "schedule/lower.py",
        "latest = min(latest, max(0, consumer - ahead))",
        "latest = min(latest, max(0, consumer - ahead + 1))",
        ("tests/schedule/test_lower.py",),
    ),
    # Verification.
    Defect(
        "verify: an op that occurs twice passes",
        "verify/completeness.py",
        "if op.kind is not Kind.U and len(ranks) > 1:",
        "if op.kind is not Kind.U and len(ranks) > 2:",
        ("tests/verify",),
    ),
    Defect(
        "verify: a missing W passes",
        "verify/completeness.py",
        "{(): whole, (inputs,): weights, (weights,): inputs}",
        "{(): whole, (weights,): inputs}",
        ("tests/verify",),
    ),
    Defect(
        "verify: a backward on another rank than its forward passes",
        "verify/completeness.py",
        "if ranks_of[op][0] != forward_rank:",
        "if ranks_of[op][0] < 0:",
        ("tests/verify",),
    ),
    Defect(
        "verify: one micro-batch above the limit passes",
        "verify/verify.py",
        "over = np.flatnonzero(in_flight > limit + _TOLERANCE)",
        "over = np.flatnonzero(in_flight > limit + 1 + _TOLERANCE)",
        ("tests/verify",),
    ),
    Defect(
        "verify: cycles pass",
        "verify/verify.py",
        "        or [*_order(schedule)]\n",
        "",
        ("tests/verify",),
    ),
    Defect(
        "verify: updates are not checked",
        "verify/verify.py",
        "        or [*_updates(schedule)]\n",
        "",
        ("tests/verify",),
    ),
    # Simulation.
    Defect(
        "simulate: a link carries any number of messages at once",
        "schedule/kernels.py",
        "departure = max(done, link_free[link[op]])",
        "departure = done",
        ("tests/simulate/test_simulate.py", "tests/simulate/test_everything.py"),
    ),
    Defect(
        "simulate: overlap inverted",
        "schedule/kernels.py",
        "                if not overlap:\n                    done = arrival\n            free[rank[op]]",
        "                if overlap:\n                    done = arrival\n            free[rank[op]]",
        ("tests/simulate/test_simulate.py", "tests/simulate/test_everything.py"),
    ),
    Defect(
        "simulate: a shared medium is free at the start of a message",
        "schedule/kernels.py",
        "            free[medium[op]] = arrival\n        arrived[op] = arrival\n",
        "            free[medium[op]] = sent[op]\n        arrived[op] = arrival\n",
        ("tests/simulate/test_simulate.py", "tests/simulate/test_everything.py"),
    ),
    Defect(
        "simulate: updates of replicas do not wait for the slowest rank",
        "schedule/kernels.py",
        "            begin = max(begin, free[rank[op]])\n            source",
        "            begin = free[rank[op]]\n            source",
        ("tests/simulate/test_simulate.py", "tests/simulate/test_everything.py"),
    ),
    Defect(
        "memory: W releases nothing",
        "simulate/memory_curves.py",
        "released = np.where(weights, before_w, saved)",
        "released = np.where(weights, zero, saved)",
        ("tests/simulate/test_memory_curves.py", "tests/simulate/test_simulate.py"),
    ),
    # Interpreter.
    Defect(
        "interpreter: a cached program is found by its id alone",
        "runtime/interpreter.py",
        "if cached is None or cached[0] is not program:",
        "if cached is None:",
        RUNTIME,
    ),
    Defect(
        "interpreter: values of a failed batch are kept",
        "runtime/interpreter.py",
        "for state in (self._arrivals, self._values, self._evicted_here):",
        "for state in (self._arrivals, self._evicted_here):",
        RUNTIME,
    ),
    Defect(
        "interpreter: U updates although only gradients are asked for",
        "runtime/interpreter.py",
        "        if not context.updates:\n            return\n",
        "",
        RUNTIME,
    ),
    Defect(
        "interpreter: I ends the use of a weight version, W does not",
        "runtime/interpreter.py",
        "if weights is not None and op.kind is not Kind.I:",
        "if weights is not None and op.kind is not Kind.W:",
        (*RUNTIME, "tests/optim"),
    ),
    Defect(
        "interpreter: sends are not waited for at the end of a program",
        "runtime/interpreter.py",
        "        self._run(cached[1], RunContext(BatchesInFlight.alone(batch), update))\n        self.finish()\n",
        "        self._run(cached[1], RunContext(BatchesInFlight.alone(batch), update))\n",
        RUNTIME,
    ),
    Defect(
        "interpreter: peak memory counts the newest weights twice",
        "runtime/interpreter.py",
        "                total -= sum(parameter.nbytes for parameter in update.parameters)\n",
        "",
        RUNTIME,
    ),
    # Stage.
    Defect(
        "stage: W does not release its activations",
        "stage/stage.py",
        "            weight_grad(pending)\n        self.activation_meter.give(size)\n",
        "            weight_grad(pending)\n",
        STAGE,
    ),
    Defect(
        "stage: the fast path does not release its activations",
        "stage/stage.py",
        "        self.activation_meter.give(saved.size)\n",
        "",
        STAGE,
    ),
    Defect(
        "stage: an evicted micro-batch still counts",
        "stage/stage.py",
        "        self.activation_meter.give(forward.size)\n",
        "",
        STAGE,
    ),
    Defect(
        "replicas: gradients of an earlier batch are lost",
        "stage/replicas.py",
        "grad = earlier if grad is None else earlier + grad",
        "grad = earlier if grad is None else grad",
        STAGE,
    ),
    Defect(
        "replicas: a parameter without a gradient gets zeros",
        "stage/replicas.py",
        "grad = total if count else None",
        "grad = total",
        STAGE,
    ),
    Defect(
        "stage: the loss scale is dropped",
        "stage/stage.py",
        "self._starts.of(weights[micro_batch] * self.loss_scale, root)",
        "self._starts.of(weights[micro_batch], root)",
        (
            "tests/stage",
            "tests/runtime/comparison/test_numeric_settings.py",
            "tests/runtime/test_optimizers.py",
        ),
    ),
    # Optimizers and weight rules.
    Defect(
        "clipping: always the 2-norm of the stages",
        "optim/clipping.py",
        "torch.linalg.vector_norm(torch.cat(norms), norm_type)",
        "torch.linalg.vector_norm(torch.cat(norms))",
        ("tests/optim/test_clipping.py", "tests/runtime/test_optimizers.py"),
    ),
    Defect(
        "update: used gradients are added to the next batch's",
        "optim/update.py",
        "        if self._grads_used:\n            self.zero()\n",
        "        if not self._grads_used:\n            self.zero()\n",
        ("tests/optim/test_update.py", "tests/runtime"),
    ),
    Defect(
        "stashing: the version of the next forward is released",
        "optim/weight_stashing.py",
        "and version < self._next_forward:",
        "and version <= self._next_forward:",
        ("tests/optim/test_weight_stashing.py", "tests/optim/test_catalogue.py"),
    ),
    Defect(
        "stashing: a kept version is stepped in place",
        "optim/weight_stashing.py",
        "max_users = 0 if is_kept else 1",
        "max_users = 1",
        ("tests/optim/test_weight_stashing.py", "tests/optim/test_catalogue.py"),
    ),
    Defect(
        "scaling: the scale is never reduced",
        "optim/scaling.py",
        "torch.tensor(float(overflow > 0)),",
        "torch.tensor(0.0),",
        ("tests/optim/test_scaling.py",),
    ),
    # Partition.
    Defect(
        "bottleneck: links do not count",
        "partition/bottleneck.py",
        "return np.maximum(load, incoming) if overlap else load + incoming + outgoing",
        "return load",
        ("tests/partition/test_bottleneck.py",),
    ),
    Defect(
        "bottleneck: ties by the shortest last stage",
        "partition/bottleneck.py",
        "penalty = EVENNESS * np.square(np.arange(longest, 0, -1) / layers)",
        "penalty = -EVENNESS * np.square(np.arange(longest, 0, -1) / layers)",
        ("tests/partition/test_bottleneck.py",),
    ),
    Defect(
        "uniform: one layer too many",
        "partition/uniform.py",
        "(stage < residual)",
        "(stage <= residual)",
        ("tests/partition/test_uniform.py",),
    ),
    Defect(
        "balanced: ties by the longest last stage",
        "partition/balanced.py",
        "best_cut(lambda _: table, stages, layers, RANGE, longest_last=False).lengths",
        "best_cut(lambda _: table, stages, layers, RANGE).lengths",
        ("tests/partition/test_balanced.py",),
    ),
    Defect(
        "replicated: the last allowed rank is not used",
        "partition/dp_loops.py",
        "or replicas + ranks_after <= most_ranks[first, end, replicas]",
        "or replicas + ranks_after < most_ranks[first, end, replicas]",
        ("tests/partition/test_replicated.py",),
    ),
    # Transport.
    Defect(
        "queue: the sequence number is stored before the entry",
        "shared_memory/queue.py",
        "        _ENTRY.pack_into(block.segment.memory, self._offset + 8, name, layout, place)\n"
        "        self._sequence += 1\n"
        "        # The sequence number is stored last: it makes the entry visible to the receiver.\n"
        "        block.words[self._offset >> 3] = self._sequence\n",
        "        self._sequence += 1\n"
        "        block.words[self._offset >> 3] = self._sequence\n"
        "        _ENTRY.pack_into(block.segment.memory, self._offset + 8, name, layout, place)\n",
        ("tests/shared_memory", "tests/transport/test_same_host.py"),
    ),
    Defect(
        "futex: no fence before the notifier is read",
        "shared_memory/futex.py",
        "        self._fence()\n        if self._words[self._index]:",
        "        if self._words[self._index]:",
        ("tests/shared_memory", "tests/transport/test_same_host.py"),
    ),
    Defect(
        "arena: entries may lie where messages were",
        "shared_memory/arena.py",
        "        if pool.exclusive:\n            return None\n",
        "",
        ("tests/shared_memory", "tests/transport/test_same_host.py"),
    ),
    Defect(
        "queue: the sender is not told that its segment is open",
        "shared_memory/queue.py",
        "                segment.words[0] = 1",
        "                segment.words[1] = 1",
        ("tests/shared_memory", "tests/transport/test_same_host.py"),
    ),
    Defect(
        "queue: a slot is freed before it is read",
        "transport/message_queue.py",
        "        payload = layout.take(slot, self._device)\n        slot.free()\n",
        "        slot.free()\n        payload = layout.take(slot, self._device)\n",
        ("tests/transport/test_message_queue.py", "tests/transport/test_same_host.py"),
    ),
    Defect(
        "layout: tensors are not padded to cache lines",
        "transport/layout.py",
        "// LINE) * LINE",
        "// 8) * 8",
        ("tests/transport/test_layout.py",),
    ),
    Defect(
        "tags: two stages share a tag",
        "transport/messages.py",
        "((stage << 13 | micro_batch % _MAX_MICRO_BATCHES) << 3)",
        "((stage << 12 | micro_batch % _MAX_MICRO_BATCHES) << 3)",
        ("tests/transport/test_messages.py", "tests/transport/test_distributed.py"),
    ),
    Defect(
        "compression: the error of the last gradient is not fed back",
        "transport/compressed.py",
        "tensor if previous_error is None else tensor + previous_error",
        "tensor",
        ("tests/transport/test_compressed.py",),
    ),
    # Written after the tests for the defects above, to measure the tests and not this list.
    Defect(
        "chain program: ties the other way round",
        "partition/chain_dp.py",
        "score.argmin(axis=1) if longest_last else width - 1",
        "score.argmin(axis=1) if not longest_last else width - 1",
        ("tests/partition/test_chain_dp.py", "tests/partition/test_balanced.py"),
    ),
    Defect(
        "chain program: an impossible cut has layers",
        "partition/chain_dp.py",
        "_trace_back(lengths, layers) if value < np.inf else []",
        "_trace_back(lengths, layers)",
        ("tests/partition/test_chain_dp.py", "tests/partition/test_limited.py"),
    ),
    Defect(
        "fast path: taken although input gradients have another memory layout",
        "stage/fast_path.py",
        "            and same_layout\n",
        "",
        ("tests/stage", "tests/conformance/test_boundaries.py"),
    ),
    Defect(
        "stage: changed slice state is not noticed",
        "stage/graph_builder.py",
        "            slice_state.check_unchanged()\n",
        "",
        ("tests/stage", "tests/conformance/test_slices.py"),
    ),
    Defect(
        "stream: all replicas write their weights as the first one",
        "runtime/stream_weights.py",
        "holders[index].index(rank) if index in wave_replicas else 0",
        "0",
        ("tests/checkpoint/test_checkpoint.py", "tests/runtime/test_streaming.py"),
    ),
    Defect(
        "costs: recompute is not counted before a backward",
        "simulate/lookup.py",
        "entries[ops.of_kind(*BACKWARD_STARTS) & self.recomputed] += _TO_RECOMPUTED",
        "pass",
        ("tests/simulate/test_simulate.py",),
    ),
    Defect(
        "channels: replicas that update together do not wait for each other",
        "schedule/channels.py",
        "share_predecessors(waits, [node_of_op[op] for op in group])",
        "pass",
        ("tests/schedule/test_channels.py", "tests/verify/test_lowered.py"),
    ),
    Defect(
        "channels: one message more than the capacity fits",
        "schedule/channels.py",
        "elif number >= depth:",
        "elif number > depth:",
        ("tests/schedule/test_channels.py", "tests/verify/test_lowered.py"),
    ),
    Defect(
        "batches: the last parts are the larger ones",
        "batches/splitting.py",
        "(part < total % parts)",
        "(part >= parts - total % parts)",
        ("tests/batches", "tests/runtime/test_pipeline.py"),
    ),
    Defect(
        "clipping: sparse gradients keep their duplicates",
        "optim/clipping.py",
        "grad.coalesce().values() if grad.is_sparse else grad",
        "grad._values() if grad.is_sparse else grad",
        ("tests/optim/test_clipping.py", "tests/stage/test_training_options.py"),
    ),
    Defect(
        "loss: a micro-batch that counts nothing keeps its NaN",
        "losses/stage_loss.py",
        "if weight == 0.0:",
        "if False:",
        ("tests/losses/test_losses.py",),
    ),
    Defect(
        "options: an option outside its limits is accepted",
        "option.py",
        'raise SettingError(f"{entry.name} is {value}; it must be above {facts.above}")',
        "pass",
        ("tests/test_option.py", "tests/training/test_config.py"),
    ),
]
