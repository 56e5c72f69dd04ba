"""A model of four unlike layers, four devices on two nodes, and a plan for them."""

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule


def timing(seconds: float) -> Timing:
    """Return a timing with this many seconds per sample."""
    return Timing((1, 8), (seconds, 8 * seconds))


def layer(i: int) -> LayerProfile:
    """Layer i takes i + 1 s forward per sample; its sizes tell it apart in every sum."""
    unit = float(i + 1)
    return LayerProfile(
        f"l{i}",
        "Linear",
        timing(unit),
        timing(2 * unit),
        timing(0.5 * unit),
        timing(1.5 * unit),
        parameters=1,
        parameter_bytes=100 * (i + 1),
        buffer_bytes=i,
        activation_bytes_per_sample=10 * unit,
        output_bytes_per_sample=1000 * unit,
    )


PROFILE = Profile(tuple(map(layer, range(4))), "f", input_bytes_per_sample=7.0, batch=8)
LINK, SLOW = Link(0.5, 1000.0), Link(2.0, 100.0)
FOUR = Cluster("four", (Device("d", 10**9),) * 4, 2, LINK, SLOW)


def a_plan() -> Plan:
    """GPipe in two stages, two micro-batches of 1 sample."""
    case_schedule = schedule("gpipe", 2, 2)
    return Plan(
        "f",
        ("l0", "l1", "l2", "l3"),
        (2, 2),
        "gpipe",
        case_schedule.lines,
        2,
        2,
        "four",
        4,
        Prediction(1.0, 0.0, (0, 0), 1.0, 1.0),
    )
