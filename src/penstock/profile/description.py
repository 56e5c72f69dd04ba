"""A profile as text for a terminal: a row per layer."""

from __future__ import annotations

from penstock.profile.profile import PHASES, Profile
from penstock.text_table import table
from penstock.units import format_bytes, format_seconds

_HEAD = ("layer", "kind", "F", "B", "I", "W", "fixed F + B", "weights", "saved", "output")


def describe(profile: Profile) -> str:
    """Describe the layers of a profile: seconds for its largest size, bytes for one sample."""
    if not profile.layers:
        return "a profile without layers"
    size = profile.sizes[-1]
    rows: list[tuple[str, ...]] = []
    has_host_times = any(layer.host_s is not None for layer in profile)
    for layer in profile:
        phase_times = [format_seconds(layer.seconds(phase, size)) for phase in PHASES]
        rows.append(
            (
                layer.name,
                layer.kind,
                *phase_times,
                format_seconds(layer.forward.fixed_s + layer.backward.fixed_s),
                format_bytes(layer.parameter_bytes),
                format_bytes(layer.activation_bytes_per_sample),
                format_bytes(layer.output_bytes_per_sample),
            )
        )
        if has_host_times:
            host_s = layer.host_s
            rows[-1] = (*rows[-1], "" if host_s is None else format_seconds(host_s))
    head = (*_HEAD, "host F + B") if has_host_times else _HEAD
    lines = [
        f"times for {size} samples, bytes for one",
        table(head, rows),
        f"whole step: {format_seconds(sum(profile.step_seconds(size)))}",
    ]
    if has_host_times:
        host_total_s = sum(layer.host_s or 0.0 for layer in profile)
        lines.append(f"of the host, which launches ahead: {format_seconds(host_total_s)}")
    return "\n".join(lines)
