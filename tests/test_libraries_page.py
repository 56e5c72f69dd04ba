"""The table of libraries: read strictly, complete, and true of Penstock."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import penstock
from penstock.errors import FileError
from penstock.schedule.catalogue import schedules

ROOT = Path(__file__).parents[1]


def load_script():
    """Import docs/make_libraries.py. Pydantic looks for the module of a dataclass by its name."""
    spec = importlib.util.spec_from_file_location("make_libraries", ROOT / "docs/make_libraries.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()
COUNTER = ROOT / "examples" / "libraries" / "count_lines.py"

SMALL = """
libraries:
  - {name: A, version: 1.0.0, repository: "https://example.org/a", ref: v1}
  - {name: B, version: "2", repository: "", ref: ""}
features:
  - name: speed
    title: Speed
    about: How fast it is.
    cells:
      B: {value: slow, where: docs/b.md}
      A: {value: fast, where: a.py, evidence: def fast, version: 1.1.0}
"""


def test_cells_are_in_the_order_of_the_libraries_with_their_versions():
    """The file names libraries, so that a moved column does not move cells to other libraries."""
    table = script.parse_feature_table(SMALL, "small.yaml")
    first, second = table.feature("speed").cells
    assert (first.value, first.version, first.evidence) == ("fast", "1.1.0", "def fast")
    assert (second.value, second.version, second.evidence) == ("slow", "2", "")
    assert table.libraries[0].address("a.py") == "https://example.org/a/blob/v1/a.py"
    assert table.libraries[0].address("https://other.org") == "https://other.org"
    assert table.libraries[0].address("./docs/x.md") == "docs/x.md"
    assert table.libraries[1].address("docs/b.md") == "docs/b.md"


def test_a_table_and_its_cells_cannot_be_changed():
    """Everybody gets the same values."""
    cell = script.feature_table().features[0].cells[0]
    with pytest.raises(FrozenInstanceError, match="value"):
        cell.value = "better"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      B: {value: slow, where: docs/b.md}\n", "", r"feature speed: no cell for B$"),
        ("      B: {", "      C: {", r"feature speed: there is no library 'C'; there are A, B$"),
        ("value: slow", 'value: ""', r"speed, B: value and where must not be empty$"),
        ("where: a.py", 'where: ""', r"speed, A: value and where must not be empty$"),
        ("name: B", "name: A", r"the library 'A' twice: remove one$"),
        ("title: Speed", "titel: Speed", r"is no feature table: .*titel"),
        ("    about: How fast it is.\n", "", r"is no feature table: .*about"),
        ("value: slow", "value: 3", r"is no feature table: .*value"),
        ("value: slow", "value: &a slow", r"anchors and aliases"),
    ],
)
def test_a_damaged_table_is_refused_with_the_place(old, new, message):
    """A missing cell would be an empty one, which reads as "no"."""
    assert SMALL.count(old) >= 1
    with pytest.raises(FileError, match=rf"^small\.yaml.*{message}"):
        script.parse_feature_table(SMALL.replace(old, new, 1), "small.yaml")


def test_a_feature_that_occurs_twice_is_refused():
    """One of the two rows would be outdated."""
    _, _, feature = SMALL.partition("features:\n")
    with pytest.raises(FileError, match="the feature 'speed' twice: remove one"):
        script.parse_feature_table(SMALL + feature, "small.yaml")


def test_unknown_features_have_no_row():
    """As any mapping."""
    with pytest.raises(KeyError, match="colour"):
        script.feature_table().feature("colour")


def test_the_packages_table_has_the_libraries_of_the_study_and_four_more():
    """Torchgpipe, FairScale and DeepSpeed are the columns of the study's table 1."""
    table = script.feature_table()
    assert [library.name for library in table.libraries] == [
        "torchgpipe",
        "FairScale",
        "DeepSpeed",
        "torch.distributed.pipelining",
        "Megatron-Core",
        "torchtitan",
        "Penstock",
    ]
    assert len(table.features) >= 20


def test_every_file_of_this_project_exists_and_has_its_phrase():
    """What is said of Penstock is backed by a test, a page, or the file that would have it."""
    table = script.feature_table()
    checked = 0
    for feature in table.features:
        for library, cell in zip(table.libraries, feature.cells, strict=True):
            if library.repository and not cell.where.startswith("./"):
                continue
            text = (ROOT / library.address(cell.where)).read_text(encoding="utf-8")
            assert cell.evidence in text, f"{feature.name}, {library.name}: {cell.evidence}"
            checked += 1
    assert checked >= len(table.features)


def test_what_penstock_has_is_shown_by_a_test_or_a_page():
    """A file of the source would only show that there is code."""
    for feature in script.feature_table().features:
        cell = feature.cells[-1]
        backed = cell.where.startswith(("tests/", "docs/", "examples/", "README", "LICENSE"))
        assert backed or cell.value == "no" or feature.name == "release", feature.name


def test_numbers_of_penstock_are_those_of_its_catalogues():
    """A schedule that is added later must not be missing in the comparison."""
    table = script.feature_table()
    synchronous = sum(facts.synchronous for facts in schedules().values())
    assert table.feature("schedules").cells[-1].value.startswith(f"{synchronous} named ones")
    assert table.libraries[-1].version == penstock.__version__


def test_lines_to_start_are_those_of_the_counted_programs():
    """The rule is in one place, and the programs run."""
    counts = runpy.run_path(str(COUNTER))["count_programs"]()
    table = script.feature_table()
    cells = table.feature("lines").cells
    for library, cell in zip(table.libraries, cells, strict=True):
        if library.name in counts:
            assert cell.value == str(counts[library.name].code), library.name
    pipe, pipeline = (counts[f"Penstock, {name}"].code for name in ("Pipe", "Pipeline"))
    assert cells[-1].value == f"{pipe} with Pipe, {pipeline} with a planned Pipeline"


def test_phrases_are_looked_up_in_the_folder_of_a_library(tmp_path):
    """A library's next version may have moved what a cell cites."""
    table = script.parse_feature_table(SMALL, "small.yaml")
    assert script.missing_places(table, "A", tmp_path) == ["A, speed: no file a.py"]
    (tmp_path / "a.py").write_text("def slow(): ...", encoding="utf-8")
    assert script.missing_places(table, "A", tmp_path) == ["A, speed: a.py has no 'def fast'"]
    (tmp_path / "a.py").write_text("def fast(): ...", encoding="utf-8")
    assert script.missing_places(table, "A", tmp_path) == []
    with pytest.raises(KeyError, match="no library 'C'; there are A, B"):
        script.missing_places(table, "C", tmp_path)


def test_the_page_shows_the_table_and_the_programs():
    """A page that is not written again would show another table than the package has."""
    text = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    assert script.written(text) == text, "run python docs/make_libraries.py"
    for feature in script.feature_table().features:
        assert f"| {feature.title} |" in text
