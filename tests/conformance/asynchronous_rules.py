"""The update equations of the asynchronous rules as their papers write them: slow, literal, with
all versions in lists.

Nothing of the package is used, its schedules neither. There is no pipeline here: a batch runs from
end to end before the next begins, and what a pipeline would have made of it is in which weights
each stage reads.

p stages, s = 0..p-1; a batch t has the micro-batches j = 0..m-1; `weights[s][v]` are the weights of
stage s after v updates, counted from the last drain. In a 1F1B stream without flushes a forward
finds v = t - gap (docs/literature/weight-versions.md), a backward v = t:

    gap(s, j, t) = min(t, max(0, ceil((p - 1 - s - j) / m)))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Weights = list[Tensor]


def gap(p: int, s: int, j: int, m: int) -> int:
    """Updates of stage s between the forward and the backward of micro-batch j, when the pipeline
    is full.
    """
    return max(0, math.ceil((p - 1 - s - j) / m))


def copies(tensors: Sequence[Tensor]) -> Weights:
    """The same numbers in memory of their own."""
    return [tensor.detach().clone() for tensor in tensors]


class Line:
    """Stages in a row, all their weight versions, and one optimizer each. Without `reads` of its
    own: synchronous training.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Any,
        loss: Any,
        m: int,
        *,
        recompute: bool = False,
    ) -> None:
        self.stages, self.loss, self.m, self.p, self.recompute = (
            stages,
            loss,
            m,
            len(stages),
            recompute,
        )
        self.parameters = [[w for w in stage.parameters() if w.requires_grad] for stage in stages]
        self.optimizers = [
            optimizer(parameters) if parameters else None for parameters in self.parameters
        ]
        self.weights: list[list[Weights]] = [[copies(parameters)] for parameters in self.parameters]
        #: What the optimizer of stage s knew when it had made version v, by parameter; nothing
        #: before the first update.
        self.known: list[list[list[dict[str, Tensor]] | None]] = [[None] for _ in stages]

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """The weights that the forward and the backward of micro-batch j of batch t read on stage
        s.
        """
        return self.weights[s][t], self.weights[s][t]

    def batch(self, x: Any, y: Any) -> Tensor:
        """Forwards, backwards and update of one batch; its mean loss."""
        parts = min(self.m, len(x))
        t = len(self.weights[0]) - 1
        total = torch.zeros((), dtype=torch.float64)
        for j, (own_x, own_y) in enumerate(
            zip(torch.tensor_split(x, parts), torch.tensor_split(y, parts), strict=True)
        ):
            read = [self.reads(s, t, j) for s in range(self.p)]
            total += self._micro_batch(own_x, own_y, len(own_x) / len(x), read)
        self.update()
        return total

    def _micro_batch(
        self, x: Any, y: Any, share: float, read: list[tuple[Weights, Weights]]
    ) -> Tensor:
        """Gradients add up in `.grad`."""
        inputs, outputs = [], []
        for s, stage in enumerate(self.stages):
            self.put(s, read[s][0])
            inputs.append(x.detach().requires_grad_(s > 0 and x.is_floating_point()))
            x = stage(inputs[s].clone())  # a layer may change its input in place
            outputs.append(x)
        outputs[-1] = loss = self.loss(x, y) * share
        grad = None
        for s in reversed(range(self.p)):
            # Into the memory that the graph refers to: what it saved of the weights are these now,
            # what it saved of the
            # activations are still those of the forward.
            self.put(s, read[s][1])
            if self.recompute:
                outputs[s] = self.stages[s](inputs[s].clone())
                outputs[s] = self.loss(outputs[s], y) * share if s == self.p - 1 else outputs[s]
            if outputs[s].requires_grad:
                outputs[s].backward(grad)
            grad = inputs[s].grad
        return loss.detach()

    def update(self) -> None:
        """One step of every stage's optimizer, from the newest weights to the next."""
        for s, optimizer in enumerate(self.optimizers):
            self.put(s, self.weights[s][-1])
            if optimizer is not None:
                optimizer.step()
            self.weights[s].append(copies(self.parameters[s]))
            self.known[s].append([self._known_of(optimizer, w) for w in self.parameters[s]])
            for parameter in self.parameters[s]:
                parameter.grad = None

    @staticmethod
    def _known_of(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
        (group,) = [
            group
            for group in optimizer.param_groups
            if any(w is parameter for w in group["params"])
        ]
        state = {key: copy.deepcopy(value) for key, value in optimizer.state[parameter].items()}
        rest = {key: value for key, value in group.items() if key != "params"}
        return {**rest, **state, "gradient": parameter.grad.clone()}

    def put(self, s: int, weights: Weights) -> None:
        """Let the modules of stage s have these weights."""
        for parameter, weight in zip(self.parameters[s], weights, strict=True):
            parameter.data.copy_(weight)

    def drain(self) -> None:
        """Nothing is under way any more: what comes next finds the newest weights first, and counts
        from there.
        """
        self.weights = [versions[-1:] for versions in self.weights]
        self.known = [versions[-1:] for versions in self.known]
        for s in range(self.p):
            self.put(s, self.weights[s][-1])

    def predicted(
        self, s: int, v: int, ahead: float, direction: Callable[[dict[str, Any]], Tensor]
    ) -> Weights:
        """Version v of stage s, moved on by `ahead` steps in the optimizer's direction; as it is
        before the first step.
        """
        adam_state = self.known[s][v]
        if adam_state is None:
            return self.weights[s][v]
        return [
            w - state["lr"] * ahead * direction(state)
            for w, state in zip(self.weights[s][v], adam_state, strict=True)
        ]


class Stash(Line):
    """PipeDream, 3.3: both read what the forward found. w(t+1) = w(t) - lr grad(w0(t-(p-1)), …,
    w_{p-1}(t)) at m = 1.
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """One version per micro-batch and stage."""
        version = self.weights[s][t - min(t, gap(self.p, s, j, self.m))]
        return version, version


class VerticalSync(Line):
    """PipeDream, 3.3, the option: every stage reads the version that the input stage had."""

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """One version per micro-batch."""
        version = self.weights[s][t - min(t, gap(self.p, 0, j, self.m))]
        return version, version


class DoubleBuffer(Line):
    """PipeDream-2BW, 3.1: W(t+1) = W(t) - lr grad(W(t-1)). Micro-batch k of all, from 1 on, reads
    max(floor((k-1)/m) - 1, 0).
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """One version per batch."""
        k = t * self.m + j + 1
        version = self.weights[s][max((k - 1) // self.m - 1, 0)]
        return version, version


class Newest(Line):
    """No rule at all: both read what is there, so that they disagree by the gap."""

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Found by the forward, found by the backward."""
        return self.weights[s][t - min(t, gap(self.p, s, j, self.m))], self.weights[s][t]


class SpecTrain(Line):
    """Chen et al. 2018: W - distance lr v, with s // 2 + p - s - 1 steps before a forward and s //
    2 before a backward.
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Both predicted for the moment at which the batch will have come back to stage 0."""
        assert self.m == 1
        momentum = lambda known: known["momentum_buffer"]  # noqa: E731
        forward = self.predicted(
            s, t - min(t, gap(self.p, s, j, self.m)), s // 2 + self.p - s - 1, momentum
        )
        return forward, self.predicted(s, t, s // 2, momentum)


class XPipe(Line):
    """Guan et al. 2019: the bellwether, j = 0, predicts in Adam's direction for all micro-batches
    of its batch.

    With the paper's T = m, D = p and rank s, round((D + T - s/2 - 2) / T) steps ahead in the
    forward, round((T + s//2 - 1) / T) in the backward; v and q are divided by the constants 1 -
    gamma and 1 - lambda.
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """What the bellwether's forward predicted, what its backward predicted."""
        version = t - min(t, gap(self.p, s, 0, self.m))
        forward = self.predicted(
            s, version, round((self.p + self.m - s / 2 - 2) / self.m), self._direction
        )
        return forward, self.predicted(s, t, round((self.m + s // 2 - 1) / self.m), self._direction)

    @staticmethod
    def _direction(state: dict[str, Any]) -> Tensor:
        gamma, lam = state["betas"]
        v, q = state["exp_avg"] / (1 - gamma), state["exp_avg_sq"] / (1 - lam)
        return v / (q.sqrt() + state["eps"])


class PipeOptim(Line):
    """Guan et al. 2023: forwards on W - lr gap dW, dW as the optimizer's last step had it;
    backwards on the newest weights.
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Predicted by as many updates as are still missing."""
        missing = gap(self.p, s, j, self.m)
        return self.predicted(s, t - min(t, missing), missing, self._direction), self.weights[s][t]

    @staticmethod
    def _direction(state: dict[str, Any]) -> Tensor:
        if "betas" in state:
            beta1, beta2 = state["betas"]
            steps = float(state["step"])
            m = state["exp_avg"] / (1 - beta1**steps)
            v = state["max_exp_avg_sq" if state["amsgrad"] else "exp_avg_sq"] / (1 - beta2**steps)
            return m / (v.sqrt() + state["eps"])
        if "alpha" in state:
            return state["gradient"] / (state["square_avg"].sqrt() + state["eps"])
        return state["momentum_buffer"] if state["momentum"] else state["gradient"]


class PipeMare(Line):
    """Yang et al. 2021. tau of a stage: the mean gap of its micro-batches.

    With `lockstep`, that of the paper's own machine, (2 (P - i) + 1) / N with i from 1 and N = m.
    T1: the k-th step has lr / max(tau, 1) ** (1 - min(k / K, 1)), k from 0.
    T2: backwards read w - tau delta; delta' = gamma delta + (1 - gamma) (w' - w), gamma = D ** (1 /
        tau).
    T3: the first `warm_up` batches are synchronous: nothing is stale, so nothing is slowed down or
        corrected.
    """

    def __init__(
        self,
        *args: Any,
        decay: float = 0.135,
        annealing: float = 100,
        lockstep: float = 0,
        warm_up: float = 0,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        self.tau = [
            sum(gap(self.p, s, j, self.m) for j in range(self.m)) / self.m for s in range(self.p)
        ]
        if lockstep:
            self.tau = [(2 * (self.p - (s + 1)) + 1) / self.m for s in range(self.p)]
        self.warm_up = warm_up
        self.gamma = [decay ** (1 / tau) if tau else 0.0 for tau in self.tau]
        self.delta = [[torch.zeros_like(w) for w in weights] for weights in self.parameters]
        self.annealing, self.k = annealing, 0

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Found by the forward; corrected towards it for the backward."""
        if self.k < self.warm_up:
            return super().reads(s, t, j)
        version = self.weights[s][t - min(t, gap(self.p, s, j, self.m))]
        return version, [
            w - self.tau[s] * d for w, d in zip(self.weights[s][t], self.delta[s], strict=True)
        ]

    def update(self) -> None:
        """With the rescheduled rate, and then the new delta."""
        power = (
            1 - min(self.k / self.annealing, 1) if self.annealing and self.k >= self.warm_up else 0
        )
        previous = [
            [group["lr"] for group in optimizer.param_groups] if optimizer else []
            for optimizer in self.optimizers
        ]
        for optimizer, tau in zip(self.optimizers, self.tau, strict=True):
            for group in optimizer.param_groups if optimizer else ():
                group["lr"] /= max(tau, 1) ** power
        super().update()
        for optimizer, rates in zip(self.optimizers, previous, strict=True):
            for group, rate in zip(optimizer.param_groups if optimizer else (), rates, strict=True):
                group["lr"] = rate
        for s, gamma in enumerate(self.gamma):
            before, after = self.weights[s][-2:]
            self.delta[s] = [
                gamma * d + (1 - gamma) * (b - a)
                for d, a, b in zip(self.delta[s], before, after, strict=True)
            ]
        self.k += 1
        if self.k <= self.warm_up:
            self.drain()


class WPipe(Line):
    """Yang et al. 2022: 2 x ranks stages; the first half of them reads the version before the
    newest, the second the newest.
    """

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Group 0 is one update late, group 1 none."""
        version = self.weights[s][max(t - 1, 0) if s < self.p // 2 else t]
        return version, version


class VirtualWorker(Line):
    """One PipeDream of HetPipe's, with N_m micro-batches in flight: more than one per stage, or
    fewer.
    """

    def __init__(self, *args: Any, in_flight: int, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.in_flight = in_flight

    def reads(self, s: int, t: int, j: int) -> tuple[Weights, Weights]:
        """Both what the forward found; on the first stage, all but the last s_local = N_m - 1
        updates at m = 1.
        """
        # The paper leaves open how fewer than one per stage are shared out: here evenly, as
        # `ps.schedule("hetpipe")` says.
        ahead = (
            self.in_flight - s
            if self.in_flight >= self.p
            else math.ceil((self.p - s) * self.in_flight / self.p)
        )
        version = self.weights[s][t - min(t, max(0, math.ceil((ahead - 1 - j) / self.m)))]
        return version, version
