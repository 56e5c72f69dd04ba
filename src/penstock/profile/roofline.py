"""Estimate a profile for a device by a roofline model: each op is bound by operations or by bytes.

    seconds of an op = launches x (launch_s + fill_s) + max(operations / (peak x its family's
    share), bytes / (bandwidth x memory))

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures"; with the cost of a launch and the time to fill the device in addition,
because small ops are bound by neither roof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, final

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import Family, LayerCounts, ModelCounts, Work
from penstock.profile.profile import LayerProfile, Phase, Profile, Timing

#: (layer, phase, samples) -> seconds
Seconds = Callable[[LayerCounts, Phase, float], float]
#: Bytes of a number, by dtype.
DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
}
#: Bytes that SGD with momentum moves per byte of parameters: it reads weight, gradient and
#: momentum, and writes weight and momentum.
UPDATE_TRAFFIC: Final = 5.0
#: Bytes that accumulating a micro-batch's gradients moves per byte of these: it reads both, and
#: writes the sum.
ACCUMULATE_TRAFFIC: Final = 3.0
#: How many times Winograd's F(4 x 4, 3 x 3) moves its bytes: once if it is a single kernel, 5.5
#: times if its transforms, which expand 16 numbers to 36, are separate kernels. Fitted, as the
#: defaults of `Efficiency` are; between 2.0 and 2.8 over VGG-19's blocks 1 to 4. Source of the
#: algorithm: Lavin and Gray 2016, "Fast algorithms for convolutional neural networks".
WINOGRAD_TRAFFIC: Final = 2.6
#: Dtypes for which cuDNN uses Winograd's algorithm: narrower ones have tensor cores, which are
#: faster. oneDNN does not use it on CPUs.
_WINOGRAD_DTYPES = ("float32", "float64")


@final
@dataclass(frozen=True)
class Efficiency:
    """The share of a device's peaks that is reached, by family of ops.

    The defaults are for a V100 at float32. Fitted to DAPPLE's profile of VGG-19 there
    (docs/literature/vgg-19-profile.md): `winograd` and `WINOGRAD_TRAFFIC`. Taken from PipeDream's
    profiles on a V100: `memory` (ReLU in VGG-16), `convolution` (1 x 1 in ResNet-50), `matrix`
    (VGG-16's fc6, GNMT's classifier), `recurrent` (GNMT's LSTMs, between 0.5 and 0.9). Assumed:
    `attention` as other products, `grouped_convolution`, `fill_s`. Other GPUs, and tensor cores,
    reach other shares: calibrate with a profile if there is one.

    Attributes:
        matrix, convolution, grouped_convolution, attention, recurrent, other: share of the peak by
            family.
        winograd: the same for 3 x 3 convolutions by Winograd's algorithm, relative to the
            operations of the direct sum: above 1, because its F(4 x 4, 3 x 3) does 4 times fewer.
            It moves `WINOGRAD_TRAFFIC` times the bytes, before and after its products; a device
            uses the faster of both algorithms.
        memory: share of the memory's bandwidth.
        launch: real cost of a launch, as a multiple of the device's `launch_s`.
        fill_s: additional seconds per launch of all families except `other`, before the device is
            full: an op whose work takes as long at its rate reaches half of that rate.
        call_s: seconds per phase of a layer that launches an op: a framework's own cost where
            nothing hides it.
        source: what it was fitted to.

    Raises:
        SettingError: a share is not above 0, or a time is negative.
    """

    matrix: float = 0.7
    convolution: float = 0.6
    winograd: float = 3.0
    grouped_convolution: float = 0.1
    attention: float = 0.6
    recurrent: float = 0.7
    other: float = 1.0
    memory: float = 0.82
    launch: float = 1.0
    fill_s: float = 5e-6
    call_s: float = 0.0
    source: str = "VGG-19 on a V100 (DAPPLE), GNMT and ResNet-50 (PipeDream)"

    def __post_init__(self) -> None:
        """Validate all shares and times."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("launch", "fill_s", "call_s"):
                if not 0 <= value < float("inf"):
                    raise SettingError(f"efficiency: {field.name} is {value!r}; it is 0 or more")
            elif field.name != "source" and not 0 < value < float("inf"):
                raise SettingError(
                    f"efficiency: {field.name} is {value!r}, a share of a peak; it must be above 0"
                )

    def share(self, family: Family) -> float:
        """Return the share of the device's peak that a family reaches."""
        name = "convolution" if family == "convolution_3x3" else family
        share: float = getattr(self, name)
        return share


def usual_efficiency(dtype: str) -> Efficiency:
    """Return the assumed efficiency at a dtype: the defaults, or those of tensor cores.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters",
    table 1: whole transformers run at 44 to 52 % of an A100's peak at float16, with all their
    transfers; so products alone reach a little more. The others are assumed lower in the same
    proportion.
    """
    if dtype in _WINOGRAD_DTYPES:
        return Efficiency()
    return Efficiency(
        matrix=0.55,
        convolution=0.45,
        grouped_convolution=0.05,
        attention=0.45,
        recurrent=0.45,
        source="assumed for tensor cores (after Narayanan et al. 2021)",
    )


@final
@dataclass(frozen=True)
class Roof:
    """A device at one dtype: the parameters of the roofline formula.

    Attributes:
        flops_per_s: peak at the dtype.
        bytes_per_s: bandwidth of the memory.
        launch_s: of one op.
        narrower: width of a number relative to the numbers that were counted.
        winograd: whether 3 x 3 convolutions may use Winograd's algorithm.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    narrower: float = 1.0
    winograd: bool = True

    @classmethod
    def of(cls, device: Device, dtype: str, counted_bytes: int) -> Roof:
        """Create the roof of a device at a dtype, for counts of numbers of `counted_bytes` bytes.

        Raises:
            SettingError: the dtype is unknown, or the device has no peak for it or no memory
                bandwidth.
        """
        if dtype not in DTYPE_BYTES:
            raise SettingError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
        peak, bandwidth = device.peak(dtype), device.memory_bytes_per_s
        if peak is None or bandwidth is None:
            dtypes = ", ".join(name for name, _ in device.flops) or "no dtype"
            missing = (
                f"peak for {dtype} (it has one for {dtypes})"
                if peak is None
                else "memory bandwidth"
            )
            raise SettingError(
                f"device {device.name} has no {missing}: give flops and memory_bytes_per_s, "
                "or take a device of the presets"
            )
        return cls(
            peak,
            bandwidth,
            device.launch_s,
            DTYPE_BYTES[dtype] / counted_bytes,
            winograd=dtype in _WINOGRAD_DTYPES and device.kind == "gpu",
        )

    def seconds(self, works: Sequence[Work], samples: float, efficiency: Efficiency) -> float:
        """Return the seconds of one phase of a layer."""
        if not works:
            return 0.0
        total = efficiency.call_s
        for work in works:
            total += work.launches * self.launch_s * efficiency.launch
            if work.family != "other":
                total += work.launches * efficiency.fill_s
            compute = work.flops_at(samples) / self.flops_per_s
            memory = work.bytes_at(samples) * self.narrower / (self.bytes_per_s * efficiency.memory)
            work_seconds = max(compute / efficiency.share(work.family), memory)
            if self.winograd and work.family == "convolution_3x3":
                work_seconds = min(
                    work_seconds, compute / efficiency.winograd + WINOGRAD_TRAFFIC * memory
                )
            total += work_seconds
        return total


def roofline(
    counts: ModelCounts,
    device: Device,
    *,
    batch: int | None = None,
    sizes: Sequence[int] | None = None,
    dtype: str = "float32",
    efficiency: Efficiency | None = None,
) -> Profile:
    """Estimate a model's profile on `device`.

    At a narrower dtype than that of the counted weights, all bytes that are moved and saved shrink,
    and the peak is the dtype's; parameters keep their size, 4 bytes with 4 more for the gradient.
    That is mixed precision, where 2 bytes of a weight, 2 of its gradient and 4 of its master copy
    add up to the same; gradients that are all-reduced between replicas are counted twice as wide as
    they are sent.

    Args:
        counts: of the model.
        device: with a peak for `dtype` and a memory bandwidth.
        batch: samples of a batch; by default that of the counts.
        sizes: micro-batch sizes for which to estimate; by default the batch, halved down to 1
            sample.
        dtype: of the computation: "float32", "tf32", "bfloat16", "float16", ...
        efficiency: shares of the peaks that are reached; by default those of `usual_efficiency`.

    Raises:
        SettingError: a figure of the device is missing, or batch or sizes are below 1.
    """
    batch = counts.batch if batch is None else batch
    points = tuple(sorted(set(sizes if sizes is not None else halves(batch))))
    if batch < 1 or not points or points[0] < 1:
        raise SettingError(f"batch {batch} and sizes {list(points)} must be 1 or more")
    reached = usual_efficiency(dtype) if efficiency is None else efficiency
    roof = Roof.of(device, dtype, counts.dtype_bytes)

    def seconds(layer: LayerCounts, phase: Phase, samples: float) -> float:
        """Return the seconds of a layer's phase on this device."""
        return roof.seconds(layer.work(phase), samples, reached)

    return replace(
        analytic_profile(counts, points, roof, seconds),
        batch=batch,
        machine={
            "device": f"{device.kind}: {device.name}, by a roofline at {dtype}",
            "efficiency": reached.source,
        },
        device=device.name,
        update_s_per_byte=UPDATE_TRAFFIC / (roof.bytes_per_s * reached.memory),
        accumulate_s_per_byte=ACCUMULATE_TRAFFIC / (roof.bytes_per_s * reached.memory),
    )


def analytic_profile(
    counts: ModelCounts, sizes: Sequence[int], roof: Roof, seconds: Seconds
) -> Profile:
    """Build a profile from counts and a function for the seconds; device fields remain empty.

    Args:
        counts: of the model; their bytes are scaled to the roof's dtype.
        sizes: micro-batch sizes.
        roof: of the device.
        seconds: function of (layer, phase, samples).
    """
    narrower = roof.narrower

    def timing(layer: LayerCounts, phase: Phase) -> Timing:
        """Return a phase's seconds at all sizes."""
        return Timing(tuple(sizes), tuple(seconds(layer, phase, size) for size in sizes))

    layers = tuple(
        LayerProfile(
            name=layer.name,
            kind=layer.kind,
            parameters=layer.parameters,
            parameter_bytes=layer.parameter_bytes,
            buffer_bytes=layer.buffer_bytes,
            tensor_bytes=layer.tensor_bytes,
            tied_tensors=layer.tied_tensors,
            activation_bytes_per_sample=layer.activation_bytes_per_sample * narrower,
            output_bytes_per_sample=layer.output_bytes_per_sample * narrower,
            entry_bytes_per_sample=layer.entry_bytes_per_sample * narrower,
            forward=timing(layer, "forward"),
            backward=timing(layer, "backward"),
            input_grad=timing(layer, "input_grad"),
            weight_grad=timing(layer, "weight_grad"),
        )
        for layer in counts
    )
    tokens = counts.input_bytes_per_sample - counts.float_input_bytes_per_sample
    return Profile(
        layers,
        counts.fingerprint,
        tokens + counts.float_input_bytes_per_sample * narrower,
        counts.batch,
        torch_version=counts.torch_version,
    )


def halves(batch: int) -> list[int]:
    """Return the batch, halved down to 1 sample, ascending.

    Seconds bend where an op moves from one roof to the other, so one point per factor of 2 is used.

    >>> halves(24)
    [1, 3, 6, 12, 24]
    """
    sizes = []
    while batch >= 1:
        sizes.append(batch)
        batch //= 2
    return sizes[::-1]
