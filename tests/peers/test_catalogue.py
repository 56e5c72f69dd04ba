"""Systems by name: facts that hold for each, and what is refused with a reason."""

from __future__ import annotations

import pytest

from penstock.errors import UnknownName
from penstock.peers.catalogue import label, system, systems
from penstock.peers.setup import RankSpec, Setup, spec_of, to_message


def setup(**more) -> Setup:
    """A setup of four stages."""
    fields = {
        "model": "vgg19",
        "model_options": {},
        "data": "random",
        "batch": 48,
        "stages": 4,
        "micro_batches": 8,
        "lengths": (1, 1, 1, 1),
        "halves": (1,) * 8,
    }
    return Setup(**{**fields, **more})


@pytest.mark.parametrize("name", systems())
def test_every_system_says_what_it_is_and_accepts_a_usual_setup(name):
    """A system that refuses everything, or that no table can explain, is of no use."""
    chosen = system(name)
    assert chosen.about
    for schedule in chosen.schedules or ("",):
        more = {"plan": "plan.json", "plan_ranks": 3} if schedule == "auto" else {}
        one = setup(schedule=schedule, **more)
        assert chosen.reason_to_refuse(one) is None
        assert chosen.ranks(one) == (3 if schedule == "auto" else chosen.ranks(one))
        assert 1 <= chosen.ranks(one) <= 4
        assert chosen.threads(one) >= 1
    assert set(chosen.two_stages) <= set(chosen.schedules)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("torch", {"schedule": "1f1b", "micro_batches": 2}, "fewer micro-batches than stages"),
        (
            "torch",
            {"schedule": "dualpipev", "micro_batches": 6},
            "fewer micro-batches than virtual",
        ),
        ("torch", {"schedule": "zbv", "halves": None}, "too few layers for 8 stages"),
        ("torch", {"schedule": "gipe"}, "torch has no schedule 'gipe'; it has 1f1b"),
        ("ddp", {"stages": 5}, "cannot be divided among 5 ranks"),
        ("ddp", {"schedule": "1f1b"}, "ddp has no schedules"),
        ("ddp", {"options": {"accumulate": True}, "micro_batches": 4}, "nothing to accumulate"),
        ("plain", {"options": {"fast": True}}, "plain has no option 'fast'; it has: none"),
        ("penstock", {"schedule": "auto"}, "no plan was made"),
        ("penstock", {"schedule": "zb-v", "halves": None}, "too few layers"),
        ("deepspeed", {"schedule": "1f1b", "micro_batches": 7}, "no 7 equal micro-batches"),
    ],
)
def test_a_system_refuses_with_a_reason(name, more, reason):
    """Before any process starts; the row of a report says why."""
    assert reason in system(name).reason_to_refuse(setup(**more))


def test_an_unknown_system_is_refused_with_the_closest_name():
    """A typing error in a file."""
    with pytest.raises(UnknownName, match="Did you mean 'torchgpipe'"):
        system("torchgpip")


def test_one_process_has_a_thread_per_stage_unless_layers_are_small(monkeypatch):
    """Waking threads takes longer than a small layer."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)))
    gpipe = system("torchgpipe")
    assert gpipe.ranks(setup()) == 1
    assert gpipe.threads(setup()) == 3
    assert gpipe.threads(setup(model_options={"width": 4})) == 1
    assert gpipe.threads(setup(model="mlp")) == 1
    assert system("plain").threads(setup()) == 1


def test_stages_per_rank_are_what_equal_is_compared_by():
    """Interleaved with interleaved; what has a division of its own apart."""
    torch = system("torch")
    assert [torch.stages_per_rank(name) for name in ("1f1b", "interleaved", "zbv")] == [1, 2, 2]
    assert system("ddp").stages_per_rank("") == 0
    assert system("penstock").stages_per_rank("auto") == 0


def test_a_setup_travels_as_json():
    """Messages are plain values, and are checked where they arrive."""
    spec = RankSpec("torch", setup(options={"a": None, "b": 1.5}), 1, 4, 1, 29500, "/tmp/x")
    assert spec_of(to_message(spec)) == spec


def test_labels_leave_out_what_all_systems_share():
    """Learning rate and momentum are no options of a system."""
    assert label("ddp", "", {"lr": 0.1, "accumulate": True}) == "ddp accumulate=True"
