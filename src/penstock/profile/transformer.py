"""Analytic profiles of GPT-like transformers, one per width of tensor parallelism.

Sources: the split of a layer is that of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), with
sequence parallelism that of Korthikanti et al. 2022 (arXiv 2205.05198), from which the bytes of
activations are (section 4). Matrix products take the seconds of `MatrixProduct`, all else that of
its memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, final

from penstock.cluster.device import Device, Link
from penstock.errors import SettingError
from penstock.profile.matrix_product import MatrixProduct
from penstock.profile.profile import LayerProfile, Profile, Timing

#: Share of a link's bandwidth, and of a memory's, that collectives and elementwise ops reach.
LINK_SHARE: Final = 0.8
MEMORY_SHARE: Final = 0.82
#: Elementwise traffic of a layer's forward in bytes: per token and hidden number outside of the
#: tensor-parallel parts (two norms, two residual sums with dropout), inside (GeLU), and per score.
_OUTSIDE, _INSIDE, _PER_SCORE = 22.0, 16.0, 9.0
#: Bytes that the loss moves per logit, forward and backward.
_PER_LOGIT = 12.0
#: Traffic of the backward over that of the forward.
_BACKWARD_TRAFFIC = 1.5
#: Numbers of 2 bytes that Adam in mixed precision stores beside a 2-byte weight and gradient: a
#: float32 master copy and two float32 moments; and bytes it moves per 2-byte weight.
_ADAM_STATES, _ADAM_TRAFFIC = 6.0, 17.0
_WIDTH = 2
#: Seconds of forward, input gradient and weight gradient for a number of samples.
_Seconds = Callable[[float], tuple[float, float, float]]


@final
@dataclass(frozen=True)
class Transformer:
    """The shape of a GPT-like model.

    Attributes:
        layers, hidden, heads, vocabulary, sequence: of the model; four times `hidden` is the inner
            width of the feed-forward part.
        recompute_attention: whether the backward computes scores and softmax again instead of
            reading them (selective recomputation of Korthikanti et al. 2022, section 5).
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 51_200
    sequence: int = 2048
    recompute_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise SettingError(f"transformer: {name} is {getattr(self, name)}; it is 1 or more")

    @property
    def parameters(self) -> float:
        """Number of parameters, by Narayanan et al. 2021, equation 2."""
        h, layers = self.hidden, self.layers
        embedding = (self.vocabulary + self.sequence) / (12 * layers * h)
        return 12 * layers * h**2 * (1 + 13 / (12 * h) + embedding)

    def step_flops(self, batch: int) -> float:
        """Return the operations of a step that recomputes all activations, by Narayanan et al.
        2021, equation 3.
        """
        s, h, layers = self.sequence, self.hidden, self.layers
        factor = 1 + s / (6 * h) + self.vocabulary / (16 * layers * h)
        return 96 * batch * s * layers * h**2 * factor


@final
@dataclass(frozen=True)
class _Group:
    """A transformer on `width` devices of one node that share its layers."""

    model: Transformer
    device: Device
    link: Link
    width: int
    sequence_parallel: bool

    @property
    def _flops_per_s(self) -> float:
        """Peak FLOP/s in 16 bits."""
        peak = self.device.peak("bfloat16") or self.device.peak("float16")
        if peak is None:
            raise SettingError(
                f"device {self.device.name} has no peak for bfloat16 or float16: give its flops"
            )
        return peak

    @property
    def _bytes_per_s(self) -> float:
        """Usable bandwidth of the device's memory."""
        if self.device.memory_bytes_per_s is None:
            raise SettingError(f"device {self.device.name} has no memory bandwidth: give it")
        return MEMORY_SHARE * self.device.memory_bytes_per_s

    def _products(self, samples: float) -> tuple[list[MatrixProduct], list[MatrixProduct]]:
        """Return the products of a layer's forward with weights, and those of attention."""
        model, width = self.model, self.width
        tokens, h, s = samples * model.sequence, model.hidden, model.sequence
        head, heads = h / model.heads, samples * model.heads / width
        weighted = [
            MatrixProduct(tokens, 3 * h / width, h),
            MatrixProduct(tokens, h, h / width),
            MatrixProduct(tokens, 4 * h / width, h),
            MatrixProduct(tokens, h, 4 * h / width),
        ]
        attention = [MatrixProduct(s, s, head, heads), MatrixProduct(s, head, s, heads)]
        return weighted, attention

    def _sum(self, products: Sequence[MatrixProduct]) -> float:
        """Return the seconds of matrix products."""
        return sum(product.seconds(self._flops_per_s, self._bytes_per_s) for product in products)

    def _exchange_s(self, samples: float) -> float:
        """Return the seconds of two all-reduces in a ring, or of as many bytes with sequence
        parallelism: two all-gathers and two reduce-scatters.
        """
        if self.width == 1:
            return 0.0
        size = _WIDTH * samples * self.model.sequence * self.model.hidden
        bandwidth = LINK_SHARE * self.link.bandwidth_bytes_per_s
        one_s = 2 * (self.width - 1) / self.width * size / bandwidth
        return 2 * (one_s + 2 * (self.width - 1) * self.link.latency_s)

    def layer_seconds(self, samples: float) -> tuple[float, float, float]:
        """Return the seconds of a layer's forward and of its input and weight gradients."""
        model, width = self.model, self.width
        weighted, attention = self._products(samples)
        numbers = samples * model.sequence * model.hidden
        scores = samples * model.heads / width * model.sequence**2
        outside = numbers / (width if self.sequence_parallel else 1)
        traffic_s = (_OUTSIDE * outside + _INSIDE * numbers / width) / self._bytes_per_s
        core_s = self._sum(attention) + _PER_SCORE * scores / self._bytes_per_s
        forward = self._sum(weighted) + core_s + traffic_s + self._exchange_s(samples)
        input_products = [product.transposed()[0] for product in weighted]
        # Both factors of a product of attention are activations: neither gradient is of weights.
        for product in attention:
            input_products += product.transposed()
        input_grad = self._sum(input_products) + self._exchange_s(samples)
        score_traffic_s = _PER_SCORE * scores / self._bytes_per_s
        input_grad += _BACKWARD_TRAFFIC * (traffic_s + score_traffic_s)
        if model.recompute_attention:
            input_grad += core_s
        return forward, input_grad, self._sum([p.transposed()[1] for p in weighted])

    def head_seconds(self, samples: float) -> tuple[float, float, float]:
        """Return the seconds of the output layer and the loss."""
        model = self.model
        logits = samples * model.sequence * model.vocabulary / self.width
        product = MatrixProduct(
            samples * model.sequence, model.vocabulary / self.width, model.hidden
        )
        loss_s = _PER_LOGIT * logits / self._bytes_per_s
        to_input, to_weight = product.transposed()
        return (
            self._sum([product]) + loss_s,
            self._sum([to_input]) + loss_s,
            self._sum([to_weight]),
        )

    def embedding_seconds(self, samples: float) -> tuple[float, float, float]:
        """Return the seconds of the embedding, which only moves bytes."""
        numbers = samples * self.model.sequence * self.model.hidden
        seconds = 6 * numbers / self._bytes_per_s
        return seconds, 0.0, seconds

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that a device saves of a layer and sample, its input included (Korthikanti et al.
        2022, equations 2 and 4); scores are left out where they are recomputed.
        """
        model, width = self.model, self.width
        scores = 0.0 if model.recompute_attention else 5 * model.heads * model.sequence
        whole = 10 if not self.sequence_parallel else 10 / width
        per_hidden = whole + 24 / width
        return model.sequence * (model.hidden * per_hidden + scores / width)

    def profile(self, sizes: Sequence[int], batch: int) -> Profile:
        """Return the profile of one device of the group."""
        model, h, width = self.model, self.model.hidden, self.width
        saved = 1 / width if self.sequence_parallel else 1.0
        boundary = _WIDTH * model.sequence * h
        # 12 h^2 weights. The biases of column-parallel products (3 h and 4 h) are divided with
        # these; those of row-parallel products (2 h) and the two norms (4 h) are not.
        layer_parameters = round((12 * h**2 + 7 * h) / width + 6 * h)
        embedding = round((model.vocabulary + model.sequence) * h / width)
        # The head's weights are those of the embedding; its stage stores a copy of them.
        head = round(model.vocabulary * h / width)

        logits = 4 * model.sequence * model.vocabulary / width

        def layer(
            name: str, kind: str, seconds: _Seconds, parameters: int, saved_bytes: float
        ) -> LayerProfile:
            """Return a layer whose output has the bytes of a boundary."""
            return LayerProfile(
                name,
                kind,
                *_timings(seconds, sizes),
                parameters=parameters,
                parameter_bytes=_WIDTH * parameters,
                buffer_bytes=0,
                activation_bytes_per_sample=saved_bytes,
                output_bytes_per_sample=boundary / width,
            )

        first = layer(
            "embedding", "Embedding", self.embedding_seconds, embedding, saved * boundary / 2
        )
        block_bytes = self.layer_activation_bytes
        block = layer("", "TransformerLayer", self.layer_seconds, layer_parameters, block_bytes)
        blocks = [replace(block, name=f"layers.{index}") for index in range(model.layers)]
        last = layer("head", "Linear", self.head_seconds, head, 2 * saved * boundary + logits)
        text = f"{model.layers} {h} {model.heads} {model.vocabulary} {model.sequence}"
        return Profile(
            (first, *blocks, last),
            sha256(text.encode()).hexdigest()[:16],
            8.0 * model.sequence,
            batch,
            machine={"device": f"{self.device.name}, analytic, {width} per layer"},
            update_s_per_byte=_ADAM_TRAFFIC / self._bytes_per_s,
            device=self.device.name,
            optimizer_states=_ADAM_STATES,
            tensor_parallel=width,
            sequence_parallel=self.sequence_parallel,
            boundary_replicas=1 if self.sequence_parallel else width,
        )


def _timings(seconds: _Seconds, sizes: Sequence[int]) -> tuple[Timing, Timing, Timing, Timing]:
    """Return the timings of forward, backward, input gradient and weight gradient."""
    rows = [seconds(float(size)) for size in sizes]
    points = tuple(sizes)
    return (
        Timing(points, tuple(row[0] for row in rows)),
        Timing(points, tuple(row[1] + row[2] for row in rows)),
        Timing(points, tuple(row[1] for row in rows)),
        Timing(points, tuple(row[2] for row in rows)),
    )


def transformer_profile(
    model: Transformer,
    device: Device,
    link: Link,
    *,
    batch: int = 1,
    widths: Sequence[int] = (1, 2, 4, 8),
) -> Profile:
    """Estimate the profile of a GPT-like transformer at every width of tensor parallelism.

    Weights and gradients are of 2 bytes, with Adam in mixed precision: 16 bytes per parameter.

    Args:
        model: its shape.
        device: with a peak for bfloat16 or float16 and a memory bandwidth.
        link: between the devices of a node, over which a layer is shared.
        batch: samples per batch.
        widths: numbers of devices that share a layer; those that do not divide the heads are left
            out. Each is estimated with and without sequence parallelism.

    Returns:
        The profile of a single device, with those of the other widths as its `widths`.

    Raises:
        SettingError: the device lacks a figure.
    """
    sizes = (1, 2, 4, 8, 16)
    whole = _Group(model, device, link, 1, sequence_parallel=False).profile(sizes, batch)
    shared = []
    for width in widths:
        if width == 1 or model.heads % width:
            continue
        for sequence_parallel in (False, True):
            group = _Group(model, device, link, width, sequence_parallel)
            shared.append(group.profile(sizes, batch))
    return replace(whole, widths=tuple(shared))
