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
        "next_departure = max(departure, arrival - delay[op])",
        "next_departure = departure",
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
        "for state in (self._arrivals, self._values, self._stored_activations):",
        "for state in (self._arrivals, self._stored_activations):",
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
        "interpreter: W does not end the use of a weight version",
        "runtime/interpreter.py",
        "        if weights is not None:\n            weights.finished(micro_batch)\n        return result\n",
        "        if weights is not None and kind is Kind.B:\n            weights.finished(micro_batch)\n"
        "        return result\n",
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
        "        self._lock.acquire()\n        self._lock.release()\n        if self._words[self._index]:",
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
    # Written after all tests above them.
    Defect(
        "chimera: the second unit begins one slot late",
        "schedule/families/chimera.py",
        "slot = 2 * (stages * unit + k)",
        "slot = 2 * (stages * unit + k) + unit",
        ("tests/schedule/families/test_chimera.py",),
    ),
    Defect(
        "chimera doubling: the second unit begins early",
        "schedule/families/chimera.py",
        "unit_slot = 3 * stages * unit",
        "unit_slot = 2 * stages * unit",
        ("tests/schedule/families/test_chimera.py",),
    ),
    Defect(
        "transfers: a send before its producer passes",
        "schedule/transfers.py",
        "if transfer.direction is Direction.SEND and place < op_place:",
        "if transfer.direction is Direction.SEND and place < 0:",
        (
            "tests/schedule/torch_csv",
            "tests/verify",
        ),
    ),
    Defect(
        "transfers: a receive behind its consumer passes",
        "schedule/transfers.py",
        "if transfer.direction is Direction.RECV and place > op_place:",
        "if transfer.direction is Direction.RECV and place < 0:",
        (
            "tests/schedule/torch_csv",
            "tests/verify",
        ),
    ),
    Defect(
        "transfers: a message to another rank than its consumer's passes",
        "schedule/transfers.py",
        "if transfer.peer != peer:",
        "if transfer.peer < 0:",
        (
            "tests/schedule/torch_csv",
            "tests/verify",
        ),
    ),
    Defect(
        "channels: a rendezvous does not wait for the receiver",
        "schedule/channels.py",
        "if depth == 0:",
        "if depth < 0:",
        (
            "tests/schedule/test_channels.py",
            "tests/schedule",
        ),
    ),
    Defect(
        "verify: slices of a sequence on two ranks pass",
        "verify/verify.py",
        "if previous is not None and schedule.placement[stage, previous] != rank:",
        "if previous is not None and schedule.placement[stage, previous] < 0:",
        ("tests/verify",),
    ),
    Defect(
        "verify: E without L passes",
        "verify/verify.py",
        "elif places.get(counterpart, {}).keys() != places[op].keys():",
        "elif counterpart in places and places[counterpart].keys() != places[op].keys():",
        ("tests/verify",),
    ),
    Defect(
        "verify: a partner may return activations before it has them",
        "verify/verify.py",
        "if rank != owner and places[load][rank] < place:",
        "if rank == owner and places[load][rank] < place:",
        ("tests/verify",),
    ),
    Defect(
        "verify: a pair of dependent ops passes",
        "verify/verify.py",
        "elif any(first in inputs for inputs in needs(second",
        "elif all(first in inputs for inputs in needs(second",
        ("tests/verify",),
    ),
    Defect(
        "verify: an op in two pairs passes",
        "verify/verify.py",
        "        paired_ops |= {first, second}\n",
        "        paired_ops |= {first}\n",
        ("tests/verify",),
    ),
    Defect(
        "verify: fewer updates on a copy pass",
        "verify/verify.py",
        "if len(versions) + waves < update_count[other_rank, stage]:",
        "if len(versions) + waves + 1 < update_count[other_rank, stage]:",
        ("tests/verify",),
    ),
    Defect(
        "verify: an op behind the last U passes",
        "verify/verify.py",
        "if last_op.kind is not Kind.U:",
        "if last_op.kind is Kind.F:",
        ("tests/verify",),
    ),
    Defect(
        "verify: versions may skip a number",
        "verify/verify.py",
        "        if version != number:",
        "        if version < number:",
        ("tests/verify",),
    ),
    Defect(
        "verify: a gap in the numbers passes",
        "verify/completeness.py",
        "        if number != expected:",
        "        if number < expected:",
        ("tests/verify",),
    ),
    Defect(
        "memory: I releases all of its micro-batch",
        "simulate/memory_curves.py",
        "end += np.where(inputs, before_w - saved, zero)",
        "end += np.where(inputs, -saved, zero)",
        ("tests/simulate",),
    ),
    Defect(
        "memory: weights of a partner's stage count",
        "simulate/memory_curves.py",
        "is_local = ~ops.of_kind(*ACTIVATION_MOVES)",
        "is_local = ops.stage >= 0",
        ("tests/simulate",),
    ),
    Defect(
        "memory: received values are kept until the end of F",
        "simulate/memory_curves.py",
        "np.where(is_forward, times.start[receiver], times.end[receiver]),",
        "times.end[receiver],",
        ("tests/simulate",),
    ),
    Defect(
        "memory: sent values leave at once",
        "simulate/memory_curves.py",
        "end, arrived = (times.end[sender], turn), (times.arrived[sender], turn)",
        "end, arrived = (times.end[sender], turn), (times.end[sender], turn)",
        ("tests/simulate",),
    ),
    Defect(
        "network: messages inside a host use its card",
        "simulate/network.py",
        "first = np.where(crosses, senders, inside)",
        "first = senders",
        (
            "tests/simulate/test_host_costs.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "network: incoming messages share nothing",
        "simulate/network.py",
        "second = np.where(crosses & self.shared, count + target, -1)",
        "second = np.full(len(links), -1)",
        (
            "tests/simulate/test_host_costs.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "streams: optimizer states of further copies are not counted",
        "simulate/weight_versions.py",
        'arrays["weight_bytes"] = weights + (schedule.stream.pipelines - 1) * states',
        'arrays["weight_bytes"] = weights',
        ("tests/simulate",),
    ),
    Defect(
        "interpreter: a failed op leaves messages behind",
        "runtime/interpreter.py",
        "            translated = self._translate_error(error, step, context)\n            self.forget()\n",
        "            translated = self._translate_error(error, step, context)\n",
        (*RUNTIME,),
    ),
    Defect(
        "interpreter: evicted activations are not counted at the partner",
        "runtime/interpreter.py",
        "            self.activation_meter.take(arrived.nbytes)\n",
        "",
        ("tests/stage/test_released_activations.py", *RUNTIME),
    ),
    Defect(
        "interpreter: a small batch waits for messages that it has not",
        "runtime/interpreter.py",
        "step.posts:\n            if (entry := find(message.micro_batch)) is not None:",
        "step.posts:\n            if (entry := find(message.micro_batch) or find(0)) is not None:",
        (*RUNTIME,),
    ),
    Defect(
        "interpreter: the gradients of replicas are not summed",
        "runtime/interpreter.py",
        "            self.replicas[op.stage].all_reduce(updates=context.updates)\n",
        "            pass\n",
        (
            *RUNTIME,
            "tests/stage",
        ),
    ),
    Defect(
        "finite check: the first micro-batch with NaN is not the one that is named",
        "stage/finite_check.py",
        "self._first_nonfinite.setdefault(stage.index, number)",
        "self._first_nonfinite[stage.index] = number",
        (
            "tests/stage",
            "tests/runtime/test_pipeline.py",
        ),
    ),
    Defect(
        "finite check: gradients that overflow in the norm alone are refused",
        "stage/finite_check.py",
        "        if names:\n            self",
        "        if True:\n            self",
        (
            "tests/stage",
            "tests/runtime/test_pipeline.py",
        ),
    ),
    Defect(
        "stage: a recomputed forward is not compared with the first",
        "stage/stage.py",
        "        self._second_forwards.check(saved.first, [*outputs, *loss_roots, *carried], micro_batch)\n",
        "",
        (
            "tests/stage/test_second_forward.py",
            "tests/stage",
        ),
    ),
    Defect(
        "random: a proof of determinism outlives a change of the code",
        "stage/stage_random.py",
        "if not proofs_hold or draw_settings",
        "if draw_settings",
        (
            "tests/stage/test_stage_random.py",
            "tests/stage",
        ),
    ),
    Defect(
        "update: gradients are dropped before the caller reads them",
        "optim/update.py",
        "        self._grads_used = self.factory is not None\n        # Last",
        "        self.zero()\n        # Last",
        (
            "tests/optim",
            "tests/runtime/test_optimizers.py",
        ),
    ),
    Defect(
        "update: a frozen parameter that has been trained is dropped",
        "optim/update.py",
        "if parameter.requires_grad or id(parameter) in trained_ids",
        "if parameter.requires_grad",
        (
            "tests/optim",
            "tests/runtime/test_optimizers.py",
        ),
    ),
    Defect(
        "ratio: rows at the end of a large tensor are left out",
        "optim/chunked_ratio.py",
        "for first in range(0, len(tensor), rows)]",
        "for first in range(0, len(tensor) - rows + 1, rows)]",
        ("tests/optim",),
    ),
    Defect(
        "ratio: pieces of one round overlap in scratch memory",
        "optim/chunked_ratio.py",
        "            used += span\n",
        "            used += max(span - 1, 0)\n",
        ("tests/optim",),
    ),
    Defect(
        "averaging: the next update steps the first replica",
        "optim/elastic_averaging.py",
        "        self._next_update = self._replica_of(number)\n",
        "        self._next_update = self._replicas[0]\n",
        (
            "tests/optim",
            "tests/runtime/test_streaming.py",
        ),
    ),
    Defect(
        "by size: parameters are not scaled",
        "partition/by_size.py",
        "layer.parameter_bytes * scale for layer",
        "layer.parameter_bytes for layer",
        ("tests/partition",),
    ),
    Defect(
        "replicated: ranks that are left over stay idle",
        "partition/replicated.py",
        "or used_ranks == chain.ranks:",
        "or used_ranks <= chain.ranks:",
        ("tests/partition",),
    ),
    Defect(
        "arena: a slot in use is taken again",
        "shared_memory/arena.py",
        "        owner.in_use.append(slot)\n",
        "        owner.free.append(slot)\n",
        (
            "tests/shared_memory",
            "tests/transport",
        ),
    ),
    Defect(
        "exchange: payloads of a failed step arrive in the next",
        "transport/in_process.py",
        "            self._payloads.clear()\n",
        "",
        (
            "tests/transport",
            "tests/runtime/test_pipeline.py",
        ),
    ),
    Defect(
        "compression: an infinite error is fed back",
        "transport/compressed.py",
        "torch.where(error.isfinite(), error, 0)",
        "error",
        (
            "tests/transport/test_compressed.py",
            "tests/transport",
        ),
    ),
    # The fourth list: written after all tests above, see README.md.
    Defect(
        "updates: a rank numbers its versions by batch",
        "schedule/updates.py",
        "versions[stage] += 1\n",
        "versions[stage] = number // micro_batches + 1\n",
        (
            "tests/schedule/test_updates.py",
            "tests/schedule/families/test_hetpipe.py",
        ),
    ),
    Defect(
        "increments: a receive overtakes a deferred one of its link",
        "schedule/streaming/increments.py",
        "(action_batch > batch or action.peer in deferred_peers)",
        "action_batch > batch",
        ("tests/schedule/streaming",),
    ),
    Defect(
        "increments: batches of later cycles count as those of the first",
        "schedule/streaming/increments.py",
        "return self._completed[equivalent] + cycles * self._cycle",
        "return self._completed[equivalent]",
        ("tests/schedule/streaming",),
    ),
    Defect(
        "increments: waves do not lengthen the cycle",
        "schedule/streaming/increments.py",
        "    if waves is None:\n        return 1\n",
        "    if waves is None or waves.length:\n        return 1\n",
        ("tests/schedule/streaming",),
    ),
    Defect(
        "pipedream: a limit on micro-batches in flight is rounded down",
        "schedule/families/pipedream.py",
        "-(-(stages - stage) * limit // stages)",
        "max(1, (stages - stage) * limit // stages)",
        (
            "tests/schedule/families/test_pipedream.py",
            "tests/schedule/families/test_hetpipe.py",
        ),
    ),
    Defect(
        "bpipe: the oldest micro-batch is evicted",
        "schedule/families/bpipe.py",
        "newest = max(held)",
        "newest = min(held)",
        ("tests/schedule/families/test_bpipe.py",),
    ),
    Defect(
        "dualpipe: one backward of the drain is not split",
        "schedule/families/dualpipe.py",
        '"B1 I0")',
        '"B1 B0")',
        (
            "tests/schedule/families/test_dualpipe.py",
            "tests/schedule/families/test_dualpipe_v.py",
        ),
    ),
    Defect(
        "v-half: odd numbers of ranks start as late as even ones",
        "schedule/families/v_memory.py",
        "late = 3 if ranks % 2 == 0 else 0",
        "late = 3",
        ("tests/schedule/families/test_v_memory.py",),
    ),
    Defect(
        "verify: a batch with two updates passes",
        "verify/stream_rules.py",
        "elif batch in updated:",
        "elif batch in updated and pending_batch == batch:",
        ("tests/verify",),
    ),
    Defect(
        "verify: with waves any copy may run a batch",
        "verify/stream_rules.py",
        "if rank != expected_rank:",
        "if rank not in ranks:",
        ("tests/verify",),
    ),
    Defect(
        "verify: messages of one kind may be received in another order",
        "schedule/transfers.py",
        "if send.transfer.message != receive.transfer.message:",
        "if send.transfer.message.kind != receive.transfer.message.kind:",
        (
            "tests/schedule/torch_csv",
            "tests/verify",
        ),
    ),
    Defect(
        "verify: a receive in a file blocks, whatever `lower` would do",
        "verify/lowered.py",
        "receives_block=False",
        "receives_block=True",
        ("tests/verify",),
    ),
    Defect(
        "verify: a value that is sent twice passes",
        "schedule/transfers.py",
        "if len(transfers) > 1:",
        "if len(transfers) > 2:",
        (
            "tests/verify",
            "tests/schedule/torch_csv",
        ),
    ),
    Defect(
        "zero: level 3 pays for the update as level 2",
        "simulate/zero.py",
        "(1.0, 1.0, 0.5, 0.0)[zero]",
        "(1.0, 1.0, 0.5, 0.5)[zero]",
        (
            "tests/simulate/test_zero.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "zero: messages of the first layer overlap too",
        "simulate/zero.py",
        "exposed_s = messages_s / length",
        "exposed_s = 0.0",
        (
            "tests/simulate/test_zero.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "all-reduce: ranks of a node do not share its link",
        "simulate/gradient_sync.py",
        "message_bytes = piece * (users if link.shared else 1)",
        "message_bytes = piece",
        ("tests/simulate",),
    ),
    Defect(
        "steady state: the drain of the stream counts",
        "simulate/steady_state.py",
        "return len(self.ends) - 2 * (self.overtaken + 1)",
        "return len(self.ends)",
        (
            "tests/simulate/test_steady_period.py",
            "tests/simulate/test_steady_state.py",
        ),
    ),
    Defect(
        "selective recompute: inputs behind a segment are free",
        "simulate/selective_recompute.py",
        "is_entry = layer == first or layer - 1 in recomputed",
        "is_entry = layer == first",
        (
            "tests/simulate/test_selective_recompute.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "sweep: both ops of a pair count as busy",
        "simulate/sweep.py",
        "        counted[dependencies.pairs + 1] = False\n",
        "",
        (
            "tests/simulate/test_sweep.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "sweep: memory of all vectors is that of the first",
        "simulate/sweep.py",
        "(array == array[0]).all() for array",
        "(array == array[0]).any() for array",
        (
            "tests/simulate/test_sweep.py",
            "tests/simulate",
        ),
    ),
    Defect(
        "interpreter: an all-reduce of a failed batch is not forgotten",
        "runtime/interpreter.py",
        "        for replicas in self.replicas.values():\n            replicas.forget()\n",
        "",
        (
            "tests/runtime/test_interpreter_state.py",
            *RUNTIME,
        ),
    ),
    Defect(
        "interpreter: gradients of W are not checked",
        "runtime/interpreter.py",
        "        if self.finite is not None:\n            self.finite.after_backward(",
        "        if self.finite is not None and kind is Kind.B:\n            self.finite.after_backward(",
        (
            "tests/stage/test_finite_check.py",
            *RUNTIME,
        ),
    ),
    Defect(
        "interpreter: returned activations still count at the partner",
        "runtime/interpreter.py",
        "            self.activation_meter.give(activations.nbytes)\n",
        "",
        (
            "tests/stage/test_released_activations.py",
            "tests/stage/test_eviction.py",
            *RUNTIME,
        ),
    ),
    Defect(
        "interpreter: peak memory without the optimizers of a weight rule",
        "runtime/interpreter.py",
        "                total += sum(map(optimizer_bytes, rule.more_optimizers()))\n",
        "",
        (
            "tests/runtime/test_interpreter_state.py",
            *RUNTIME,
        ),
    ),
    Defect(
        "stage: a side loss has the weight of the main loss",
        "stage/stage.py",
        "batch.shares if side or batch.loss_weights is None",
        "batch.shares if batch.loss_weights is None",
        (
            "tests/stage/test_side_loss_weights.py",
            "tests/stage",
        ),
    ),
    Defect(
        "stage: a recomputed graph does not count",
        "stage/stage.py",
        "        self.activation_meter.take(size - saved.size)\n",
        "",
        (
            "tests/stage/test_released_activations.py",
            "tests/stage",
        ),
    ),
    Defect(
        "stage: I sends no gradients to earlier slices",
        "stage/stage.py",
        "self._slice_states.store_grads(micro_batch, grads[count:])",
        "self._slice_states.store_grads(micro_batch, [None] * len(grads[count:]))",
        (
            "tests/stage",
            "tests/conformance/test_slices.py",
        ),
    ),
    Defect(
        "activation meter: a view counts as its whole storage",
        "stage/activation_meter.py",
        "saved_bytes + sum(tensor.nbytes for tensor in views.values())",
        "saved_bytes + sum(\n            tensor.untyped_storage().nbytes() for tensor in views.values()\n        )",
        (
            "tests/stage/test_activation_meter.py",
            "tests/stage",
        ),
    ),
    Defect(
        "stage: the fast path of a model that is traced again stays",
        "stage/stage.py",
        "        self._fast_path.clear()\n",
        "",
        (
            "tests/stage/test_fast_path_renewal.py",
            "tests/stage",
        ),
    ),
    Defect(
        "pipemare: learning rates are rescheduled one update early",
        "optim/pipemare.py",
        "min(self._updates / self._annealing, 1)",
        "min((self._updates + 1) / self._annealing, 1)",
        (
            "tests/optim/test_pipemare.py",
            "tests/optim",
        ),
    ),
    Defect(
        "prediction: a backward whose version has gone reads the newest",
        "optim/predicted.py",
        "if number in self._in_backward and not self._working.has((version, ahead)):",
        "if not self._working.has((version, ahead)):",
        (
            "tests/optim/test_directions.py",
            "tests/optim/test_predicted.py",
        ),
    ),
    Defect(
        "direction: AMSGrad's maximum is ignored",
        "optim/directions.py",
        '"max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"',
        '"exp_avg_sq"',
        (
            "tests/optim/test_predicted.py",
            "tests/optim",
        ),
    ),
    Defect(
        "direction: a parameter without a gradient counts a step",
        "optim/directions.py",
        "if i in self._steps and parameter.grad is not None:",
        "if i in self._steps:",
        (
            "tests/optim/test_directions.py",
            "tests/optim",
        ),
    ),
    Defect(
        "waves: a replica stops at the first wave that all have marked",
        "optim/wave_weights.py",
        "if self._receive() and wave >= ending:",
        "if self._receive():",
        (
            "tests/optim/test_wave_drain.py",
            "tests/optim/test_wave_weights.py",
        ),
    ),
    Defect(
        "folded: slack is ignored",
        "partition/folded.py",
        "chain.bottleneck(even_ranks) * (1 + chain.slack) * (1 + ROUNDING)",
        "chain.bottleneck(even_ranks) * (1 + ROUNDING)",
        (
            "tests/partition/test_looped.py",
            "tests/partition",
        ),
    ),
    Defect(
        "folded: the two stages of a rank have its memory each",
        "partition/folded.py",
        "(front_bytes + back_bytes <= limits[rank])",
        "(np.maximum(front_bytes, back_bytes) <= limits[rank])",
        (
            "tests/partition/test_looped.py",
            "tests/partition",
        ),
    ),
    Defect(
        "limited: the stage with the most bytes is named, not the one above its limit",
        "partition/by_memory_limit.py",
        "np.argmax(np.subtract(required, limits))",
        "np.argmax(required)",
        (
            "tests/partition/test_by_memory_limit.py",
            "tests/partition",
        ),
    ),
    Defect(
        "exchange: the newest payload of a message arrives first",
        "transport/in_process.py",
        "queue.popleft()",
        "queue.pop()",
        (
            "tests/transport/test_in_process.py",
            "tests/stage/test_replicas.py",
            "tests/transport",
        ),
    ),
    Defect(
        "payload: a received tensor may have other strides",
        "transport/payload.py",
        "if copies or restored.stride() != tuple(strides):",
        "if copies:",
        (
            "tests/transport/test_payload_strides.py",
            "tests/transport",
        ),
    ),
    Defect(
        "distributed: later messages are packed by their own strides",
        "transport/distributed.py",
        "return announced_forms  # the receiver",
        "return forms  # the receiver",
        (
            "tests/transport/test_payload_strides.py",
            "tests/transport/test_distributed.py",
        ),
    ),
]
