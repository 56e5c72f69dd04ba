"""Fixtures for the partition tests: profiles made from plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock import compiled
from penstock.profile.profile import LayerProfile, Profile, Timing

#: DAPPLE's VGG-19 on a V100 at 32 samples: forward and backward in ms (docs/literature/vgg-19-profile.md).
VGG_FORWARD = [3.4, 7.2, .65, 3.4, 5.0, .3, 2.3, 3.55, 3.55, 3.55, .165, 1.71, 2.9, 2.88, 2.86, .1,
               .965, .965, .96, .965, .03, .45, .1, .05, .01]  # fmt: skip
VGG_BACKWARD = [2 * forward for forward in VGG_FORWARD[:-1]] + [0.2]


def build_profile(
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    parameters: Sequence[int] | None = None,
    output_bytes: Sequence[float] | None = None,
    sizes: Sequence[int] = (32,),
) -> Profile:
    """Seconds are given for the largest size and grow with it; backward is 0 and all else 1 unless
    given.
    """
    count = len(forward)

    def timing(seconds: float) -> Timing:
        return Timing(tuple(sizes), tuple(seconds * size / sizes[-1] for size in sizes))

    rows = zip(
        forward,
        backward or [0.0] * count,
        kinds or ["Linear"] * count,
        parameters or [1] * count,
        output_bytes or [1.0] * count,
        strict=True,
    )
    layers = []
    for index, (f, b, kind, params, out) in enumerate(rows):
        half = timing(b / 2)
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                kind=kind,
                forward=timing(f),
                backward=timing(b),
                input_grad=half,
                weight_grad=half,
                parameters=params,
                parameter_bytes=4 * params,
                buffer_bytes=0,
                activation_bytes_per_sample=out,
                output_bytes_per_sample=out,
            )
        )
    return Profile(tuple(layers), fingerprint="made up", input_bytes_per_sample=1.0, batch=64)


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., Profile]:
    """The factory, for tests that cannot import it."""
    return build_profile


@pytest.fixture(scope="session")
def vgg() -> Profile:
    """The profile of docs/literature/vgg-19-profile.md, in ms."""
    return build_profile(VGG_FORWARD, VGG_BACKWARD)


@pytest.fixture(params=["plain", "compiled"], scope="module")
def loops(request) -> Iterator[None]:
    """Both forms of the kernels, whatever there is to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "is_worth_compiling", lambda *_: request.param == "compiled")
        yield
