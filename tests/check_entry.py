"""Run what catalogue entries must pass: `make check NAME=zb-h1`, or several names.

An entry is a schedule, a partitioner, a weight rule, a planner, a model of the zoo, or an option of
training (an argument of `ps.Pipeline`). For each kind with that name these tests run:

* the entry's own test file, `tests/<room>/test_<module>.py`;
* of the files in `KINDS`, the tests that adopt all entries, for this entry only;
* for an option, the tests whose source or parameters mention it, and those that hold all
  declarations of options.

The style of the entry's file and the list of papers are checked as well. Exit status: 0 if all
passed, 1 if something failed or is missing, 2 for an unknown name.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import UnknownName

ROOT = Path(__file__).parents[1]

#: The list of papers names every entry of the kinds that it covers.
PAPERS_TEST = (
    "tests/test_docs.py::test_everything_that_is_found_by_name_stands_in_the_list_of_papers"
)

#: Rooms whose tests concern options of training.
OPTION_ROOMS = ("stage", "runtime", "training", "optim", "losses")


@dataclass(frozen=True)
class Kind:
    """A kind of catalogue entry.

    Attributes:
        name: for messages.
        recipe: heading in CONTRIBUTING.md.
        laws: test files that adopt every entry of the kind by themselves.
    """

    name: str
    recipe: str
    laws: tuple[str, ...]


KINDS = {
    "schedule": Kind(
        "schedule",
        "A schedule",
        (
            "tests/schedule/test_catalogue.py",
            "tests/schedule/test_op.py",
            "tests/schedule/test_replicas.py",
            "tests/schedule/streaming/test_period.py",
            "tests/schedule/torch_csv/test_actions.py",
            "tests/weights/test_compatibility.py",
            "tests/weights/test_weight_uses.py",
            "tests/search/test_schedules.py",
            "tests/agreement/test_order.py",
            "tests/devices/test_nccl_posts.py",
            "tests/ranks/test_tied_weights.py",
            "tests/conformance/test_exact_gradients.py",
            "tests/conformance/test_evaluation.py",
            "tests/conformance/test_sent_values.py",
            "tests/conformance/test_torch_runtime.py",
            "tests/conformance/test_self_check.py",
        ),
    ),
    "partition method": Kind(
        "partitioner", "A partitioner", ("tests/partition/test_catalogue.py",)
    ),
    "weight rule": Kind(
        "weight rule",
        "A weight rule",
        (
            "tests/weights/test_catalogue.py",
            "tests/weights/test_compatibility.py",
            "tests/optim/test_catalogue.py",
            "tests/verify/test_weight_rules.py",
            "tests/conformance/test_asynchronous.py",
            "tests/conformance/test_stream_restart.py",
        ),
    ),
    "planner": Kind(
        "planner",
        "A planner",
        (
            "tests/search/test_catalogue.py",
            "tests/search/planners/test_asked.py",
            "tests/search/planners/test_cut_only.py",
        ),
    ),
    "model": Kind(
        "model",
        "A model",
        ("tests/zoo/test_catalogue.py", "tests/tracing/test_traced_chain.py"),
    ),
    "option": Kind("training option", "An option of training", ("tests/test_option.py",)),
}


@dataclass(frozen=True)
class Entry:
    """An entry of one kind.

    Attributes:
        name: its name.
        kind: its kind.
        source: the file of the package that defines it.
        own_tests: its test file if there is one, else where to write it.
    """

    name: str
    kind: Kind
    source: Path
    own_tests: Path

    def files(self) -> list[str]:
        """Test files that may hold tests of the entry, from the root of the repository."""
        if self.kind is KINDS["option"]:
            return [*sorted(_files_that_mention(self.name)), *self.kind.laws]
        entry_files = [str(self.own_tests.relative_to(ROOT))] if self.own_tests.exists() else []
        return [*entry_files, *(path for path in self.kind.laws if path not in entry_files)]

    def selects(self, item: pytest.Item, other_names: frozenset[str]) -> bool:
        """Whether a test concerns the entry.

        Args:
            item: the test.
            other_names: longer names of entries that contain this entry's name.
        """
        parameters = item.name.partition("[")[2]
        if self.kind is KINDS["option"]:
            if str(item.path.relative_to(ROOT)) in self.kind.laws:
                return True
            function = inspect.getsource(getattr(item, "function", type(self)))
            return bool(re.search(rf"\b{self.name}\b", f"{function} {parameters}"))
        if item.path == self.own_tests:
            return True
        for other in other_names:
            parameters = parameters.replace(other, "")
        return bool(re.search(rf"(?<![\w]){re.escape(self.name)}(?!\w)", parameters))


def _files_that_mention(option: str) -> set[str]:
    """Return the test files of the rooms of training that mention an option; of all if none do."""
    for folders in ([ROOT / "tests" / room for room in OPTION_ROOMS], [ROOT / "tests"]):
        paths = {path for folder in folders for path in folder.rglob("test_*.py")}
        word = re.compile(rf"\b{option}\b")
        mentioning = {path for path in paths if word.search(path.read_text(encoding="utf-8"))}
        if mentioning:
            break
    return {str(path.relative_to(ROOT)) for path in mentioning}


def _entry(name: str, kind: Kind, function: Callable[..., object]) -> Entry:
    """Return the entry that a function registers."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    _, *rooms, module = function.__module__.split(".")
    source = ROOT / "src" / "penstock" / Path(*rooms, f"{module}.py")
    own_tests = ROOT / "tests" / Path(*rooms, f"test_{module}.py")
    if not own_tests.exists():
        # A planner may have its tests one folder up.
        others = sorted((ROOT / "tests" / rooms[0]).rglob(own_tests.name))
        own_tests = others[0] if others else own_tests
    return Entry(name, kind, source, own_tests)


def all_entries() -> list[Entry]:
    """Return all entries of all kinds."""
    import penstock as ps
    from penstock.option import CommonOptions
    from penstock.partition.catalogue import PARTITIONERS
    from penstock.schedule.catalogue import FAMILIES
    from penstock.search.catalogue import PLANNERS
    from penstock.search.schedules import COST_SCHEDULES
    from penstock.stage.training_options import TrainingOptions
    from penstock.weights.catalogue import WEIGHT_RULES
    from penstock.zoo.catalogue import MODELS

    entries = []
    for registry in (FAMILIES, COST_SCHEDULES, PARTITIONERS, WEIGHT_RULES, PLANNERS, MODELS):
        kind = KINDS["schedule" if registry is COST_SCHEDULES else registry.kind]
        for name, entry in registry.entries().items():
            entries.append(_entry(name, kind, entry.make))
    declaring = (TrainingOptions, CommonOptions)
    for name, parameter in inspect.signature(ps.Pipeline).parameters.items():
        if parameter.default is not parameter.empty:
            owner = next((cls for cls in declaring if name in vars(cls)["__annotations__"]), None)
            entries.append(_entry(name, KINDS["option"], owner or ps.Pipeline))
    return entries


class EntryTests:
    """A pytest plugin that keeps the tests of some entries, and counts them by entry."""

    def __init__(self, entries: list[Entry], names: set[str]) -> None:
        self.counts = dict.fromkeys(entries, 0)
        self._files = {entry: frozenset(entry.files()) for entry in entries}
        self._other_names = {
            entry: frozenset(name for name in names if entry.name in name and name != entry.name)
            for entry in entries
        }

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests of other entries."""
        selected, deselected = [], []
        for item in items:
            entries = [
                entry
                for entry, others in self._other_names.items()
                if str(item.path.relative_to(ROOT)) in self._files[entry]
                and entry.selects(item, others)
            ]
            for entry in entries:
                self.counts[entry] += 1
            always = item.nodeid == PAPERS_TEST
            (selected if entries or always else deselected).append(item)
        items[:] = selected
        config.hook.pytest_deselected(items=deselected)


def missing_parts(entry: Entry) -> Iterator[str]:
    """Yield what an entry still needs, as requests."""
    if entry.kind is KINDS["option"]:
        if not _files_that_mention(entry.name):
            yield f"write a test in tests/runtime that passes {entry.name}= to ps.Pipeline"
        return
    if not entry.own_tests.exists():
        yield f"write {entry.own_tests.relative_to(ROOT)}, a test file for this entry"
    for command in (["check"], ["format", "--check"]):
        files = [str(path) for path in (entry.source, entry.own_tests) if path.exists()]
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "--quiet", *files],
            cwd=ROOT,
            check=False,
        )
        if result.returncode:
            yield f"run `ruff {command[0]} {' '.join(files)}`"


def find(names: list[str]) -> list[Entry]:
    """Return the entries with these names, of every kind.

    Raises:
        UnknownName: there is no entry of a name.
    """
    entries = all_entries()
    known = sorted({entry.name for entry in entries})
    for name in names:
        if name not in known:
            raise UnknownName("catalogue entry", name, known)
    return [entry for entry in entries if entry.name in names]


def main(names: list[str]) -> int:
    """Check the entries with these names. Returns the exit status."""
    if not names or not all(names):
        print("usage: make check NAME=zb-h1, or another name of a catalogue entry")
        return 2
    try:
        entries = find(names)
    except UnknownName as error:
        print(error)
        return 2
    plugin = EntryTests(entries, {entry.name for entry in all_entries()})
    files = list(dict.fromkeys(path for entry in entries for path in entry.files()))
    options = ["-p", "no:cacheprovider", "-q", "--rootdir", str(ROOT)]
    status = pytest.main([*options, *files, PAPERS_TEST], plugins=[plugin])
    requests = {entry: list(missing_parts(entry)) for entry in entries}
    for entry, count in plugin.counts.items():
        print(f"{entry.name}, {entry.kind.name}: {count} tests, defined in {entry.source}")
        for request in requests[entry]:
            print(f"  still to do: {request}")
    if status or any(requests.values()):
        recipes = list(dict.fromkeys(entry.kind.recipe for entry in entries))
        print(f"not finished; see {', '.join(map(repr, recipes))} in CONTRIBUTING.md")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
