"""Files become values of a type, or one line that says where they do not fit it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from penstock.errors import FileError, SettingError
from penstock.files.read import known_keys, parse_json, parse_yaml, read_json, read_yaml


@dataclass(frozen=True)
class Run:
    """Settings as a dataclass with a check of its own."""

    model: str = "mlp"
    rate: float = 0.1
    cut: tuple[int, ...] = ()
    kind: Literal["sgd", "adam"] = "sgd"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise SettingError(f"rate is {self.rate}; it must be above 0")


class Lab(BaseModel):
    """The same as a Pydantic model."""

    name: str
    nodes: list[int] = []


def test_yaml_becomes_a_dataclass_a_model_or_plain_values(tmp_path):
    """Anything that Pydantic can validate is a type to read."""
    path = tmp_path / "run.yaml"
    path.write_text("rate: 1\ncut: [2, 3]\noptions: {layers: [6]}\n")
    assert read_yaml(path, Run) == Run(rate=1.0, cut=(2, 3), options={"layers": [6]})
    assert read_yaml(path, dict) == {"rate": 1, "cut": [2, 3], "options": {"layers": [6]}}
    assert parse_yaml("name: x\nnodes: [1]", Lab, "lab.yaml") == Lab(name="x", nodes=[1])
    assert parse_yaml("# nothing", Run, "run.yaml") == Run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: gpt", r"unknown key\. Did you mean 'model'\? Known: model, rate, cut"),
        ("rate: fast", "at rate: Input should be a valid number, not 'fast'"),
        ("rate: '1'", "at rate: Input should be a valid number, not '1'"),
        ("rate: true", "at rate: Input should be a valid number, not True"),
        ("rate: -1", r"rate is -1.0; it must be above 0"),
        ("cut: [1, x]", r"at cut\.1: Input should be a valid integer, not 'x'"),
        ("kind: sdg", "at kind: Input should be 'sgd' or 'adam', not 'sdg'"),
        ("cut: [x, y, z]", r"at cut\.0: .* \(and 2 more errors\)"),
        ("- model", r"at the top: \['model'\] is no mapping with keys of model, rate, cut"),
        ("[]", r"at the top: \[\] is no mapping with keys of model, rate, cut"),
        ("0", "at the top: 0 is no mapping with keys of model, rate, cut"),
        ("''", "at the top: '' is no mapping with keys of model, rate, cut"),
    ],
)
def test_what_does_not_fit_the_type_is_refused_with_its_place(text, message):
    """A misspelt key that is silently ignored costs a night's training."""
    with pytest.raises(FileError, match=f"^run.yaml is no configuration: .*{message}"):
        parse_yaml(text, Run, "run.yaml", kind="configuration")


@dataclass(frozen=True)
class Fleet:
    """Runs, in several places of the type."""

    first: Run | None = None
    others: tuple[Run, ...] = ()
    by_name: dict[str, list[Run]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first: {modle: x}", r"at first\.modle: unknown key\. Did you mean 'model'\?"),
        ("others: [{}, {ratte: 1}]", r"at others\.1\.ratte: .*mean 'rate'\? Known: model, rate"),
        ("by_name: {a: [{kin: 1}]}", r"at by_name\.a\.0\.kin: .*mean 'kind'\?"),
        ("others: [3]", r"at others\.0: 3 is no mapping with keys of model, rate, cut"),
        ("first: 3", r"at first: 3 is no mapping with keys of model, rate, cut"),
    ],
)
def test_the_known_keys_are_those_of_the_place(text, message):
    """A file has several levels, and a misspelt key may be on any."""
    with pytest.raises(FileError, match=f"^fleet.yaml is no fleet: {message}"):
        parse_yaml(text, Fleet, "fleet.yaml")


def test_a_missing_file_is_named_with_its_kind():
    """The first mistake that everybody makes."""
    with pytest.raises(FileError, match=r"^cannot read the run nowhere.yaml: No such file"):
        read_yaml("nowhere.yaml", Run)
    with pytest.raises(FileError, match=r"^cannot read the lab nowhere.json: No such file"):
        read_json("nowhere.json", Lab)


def test_json_needs_no_schema_but_may_have_to_have_one():
    """Files that outlive a version carry its number; true and 1.0 are none."""
    assert parse_json('{"name": "x"}', Lab, "lab.json") == Lab(name="x")
    for version in ("true", "1.0", "2", "null", "[]"):
        with pytest.raises(FileError, match="no lab of schema 1: its schema is "):
            parse_json(f'{{"name": "x", "schema": {version}}}', Lab, "lab.json", 1)


@pytest.mark.parametrize(
    ("text", "schema", "kind", "message"),
    [
        ('{"name": "x"}', 1, None, "no lab of schema 1: its schema is missing, so it is another"),
        ("[]", 1, None, "no lab of schema 1: its schema is missing"),
        ("3", (1, 3), None, "no lab of schema 1 or 3: its schema is missing"),
        (
            '{"schema": 2}',
            (1, 3),
            "cluster",
            "no cluster of schema 1 or 3: its schema is 2. Create",
        ),
        ('{"schema": 2, "programs": []}', 1, "profile", "lab.json is a plan, not a profile"),
        ('{"schema": 2, "layers": []}', 1, "plan", "lab.json is a profile, not a plan"),
        ('{"layers": []}', 1, "plan", "lab.json is a profile, not a plan"),
        ('{"schema": 2, "programs": []}', 1, "plan", "no plan of schema 1: its schema is 2"),
        ('{"schema": 2, "programs": []}', 1, None, "no lab of schema 1: its schema is 2"),
        ('{"schema": 2}', 1, "plan", "no plan of schema 1: its schema is 2"),
    ],
)
def test_another_schema_is_named_and_so_is_a_plan_or_profile_in_the_place_of_the_other(
    text, schema, kind, message
):
    """A file of another kind has no use for the advice to create it again."""
    with pytest.raises(FileError, match=message):
        parse_json(text, Lab, "lab.json", schema, kind=kind)


def test_supported_schemas_are_read():
    """One, or several."""
    for schema in (2, (1, 2), frozenset({2})):
        assert parse_json('{"schema": 2}', dict, "x.json", schema) == {"schema": 2}


def test_a_file_without_any_text_is_refused_and_one_of_comments_is_empty(tmp_path):
    """The first was cut off; the second is an empty mapping."""
    path = tmp_path / "run.yaml"
    for text in ("", " \n\t\n"):
        path.write_text(text)
        with pytest.raises(FileError, match=r"run.yaml is no run: it is empty$"):
            read_yaml(path, Run)
    path.write_text("# a comment\n")
    assert read_yaml(path, Run) == Run()


def test_what_stands_in_the_place_of_a_mapping_is_named():
    """Plain values have no keys that a message could list."""
    with pytest.raises(FileError, match=r"^x is no dict: at the top: Input should be .*, not 3$"):
        parse_yaml("3", dict, "x")
    with pytest.raises(FileError, match=r"^x is no lab: at name: the key is missing$"):
        parse_yaml("nodes: []", Lab, "x")
    with pytest.raises(FileError, match=r"unknown key; remove it\. Known: name, nodes"):
        parse_yaml("{name: a, zzz: 1}", Lab, "x")


def test_keys_are_known_by_their_place_in_a_type():
    """None where any key may stand, or one of several types."""
    keys = ("model", "rate", "cut", "kind", "options")
    assert known_keys(Run, ()) == keys
    assert known_keys(Run | None, ()) == known_keys(Annotated[Run, "x"], ()) == keys
    assert known_keys(Lab, ()) == ("name", "nodes")
    assert known_keys(tuple[Lab, Run], (1,)) == known_keys(tuple[Run, ...], (4,)) == keys
    assert known_keys(tuple[Lab, Run], (7,)) == keys
    assert known_keys(dict[str, list[Run]], ("a", 0)) == keys
    assert known_keys(Run, ("options",)) == known_keys(Run | Lab | None, ()) == ()
    assert known_keys(Fleet, ("nothing",)) == known_keys(dict, ("a",)) == ()


def test_half_a_surrogate_pair_is_refused():
    """It cannot be printed, nor be part of a path."""
    with pytest.raises(FileError, match=r"lab.json is no lab: .*Invalid JSON"):
        parse_json(r'{"name": "\ud800"}', Lab, "lab.json")
