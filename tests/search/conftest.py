"""Profiles for planners."""

import pytest

from penstock.profile.profile import LayerProfile, Profile, Timing


@pytest.fixture(scope="session")
def profile_of():
    """A profile from seconds per sample and layer, backward twice forward; fixed cost, bytes and
    sizes by keyword.
    """

    def make(seconds, fixed=0.0, *, activation=100.0, output=10.0, parameters=1000, batch=16):
        def timing(per_sample):
            return Timing((1, batch), (fixed + per_sample, fixed + batch * per_sample))

        def spread(value):
            return value if isinstance(value, (list, tuple)) else [value] * len(seconds)

        rows = zip(seconds, spread(activation), spread(output), spread(parameters), strict=True)
        layers = tuple(
            LayerProfile(
                f"l{i}",
                "L",
                timing(f),
                timing(2 * f),
                timing(f),
                timing(f),
                1,
                p,
                0,
                float(a),
                float(o),
            )
            for i, (f, a, o, p) in enumerate(rows)
        )
        return Profile(layers, "abc", 10.0, batch)

    return make
