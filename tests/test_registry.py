"""Registry: entries in one file each, found by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.errors import UnknownName
from penstock.registry import Registry, find_plugins

ENTRY = """
from {package}_list import KINDS

@KINDS.register({name!r}, aliases={aliases!r}, colour={colour!r})
def make():
    return {name!r}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package of two entries on the import path, and its registry."""
    package = "penstock_registry_test"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / f"{package}_list.py").write_text(
        f"from penstock.registry import Registry\nKINDS = Registry('colour scheme', {package!r})\n"
    )
    for name, aliases, colour in (("sunset", ("dusk",), "red"), ("noon", (), "white")):
        (tmp_path / package / f"{name}.py").write_text(
            ENTRY.format(package=package, name=name, aliases=aliases, colour=colour)
        )
    yield __import__(f"{package}_list").KINDS
    for module in [module for module in sys.modules if module.startswith(package)]:
        del sys.modules[module]


def test_files_are_imported_at_the_first_look_up_and_not_before(folder):
    """A new entry is one new file, and importing the list costs nothing."""
    assert "penstock_registry_test.sunset" not in sys.modules
    assert list(folder.entries()) == ["noon", "sunset"]
    assert "penstock_registry_test.sunset" in sys.modules


def test_an_entry_is_found_by_name_and_alias_with_its_facts(folder):
    """Facts are what a list shows without making the thing; no aliases, no mention of them."""
    assert folder.find("dusk") is folder.find("sunset")
    assert folder.find("sunset").make() == "sunset"
    assert folder.find("sunset").facts == {"colour": "red", "aliases": ("dusk",)}
    assert folder.find("noon").facts == {"colour": "white"}


def test_an_unknown_name_is_refused_with_the_closest_and_all(folder):
    """Aliases are suggested too: they are what people type."""
    message = r"^no colour scheme called 'dusc'\. Did you mean 'dusk'\? Known: noon, sunset, dusk$"
    with pytest.raises(UnknownName, match=message) as caught:
        folder.find("dusc")
    assert (caught.value.kind, caught.value.name, caught.value.valid_names) == (
        "colour scheme",
        "dusc",
        ("noon", "sunset", "dusk"),
    )


def test_an_unknown_name_like_no_other_is_refused_without_a_guess(folder):
    """A bad guess is worse than none."""
    with pytest.raises(UnknownName, match=r"^no colour scheme called 'xyzzy'\. Known: noon"):
        folder.find("xyzzy")


def test_a_name_goes_before_an_alias_of_the_same_spelling(folder):
    """A user's own entry called as one of our aliases was once unreachable."""
    folder.register("dusk", colour="blue")(lambda: "mine")
    assert folder.find("dusk").make() == "mine"
    assert folder.find("sunset").make() == "sunset"


def test_registering_leaves_the_function_as_it_is(folder):
    """A family can still be called directly, in a doctest or a notebook."""

    def make():
        return 7

    assert folder.register("seven")(make) is make
    assert "seven" in folder.entries()


def test_two_registries_do_not_share_entries(folder):
    """A registry is an object, not a state of the process."""
    other = Registry("colour scheme", "penstock_registry_test")
    assert other.entries() == {}


def _install_plugin(folder, name, module, text):
    """Make a distribution of one module that names it as a plug-in."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[penstock.plugins]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(text)


def test_plugins_are_searched_once_for_each_path(tmp_path, monkeypatch):
    """A rank has the path of its launcher, and may see other distributions than the process that
    forked it.
    """
    _install_plugin(tmp_path, "late", "late_plugin", "")
    before = find_plugins()
    assert find_plugins() is before
    monkeypatch.syspath_prepend(tmp_path)
    assert {entry_point.name for entry_point in find_plugins()} == {
        "late",
        *(entry_point.name for entry_point in before),
    }
    monkeypatch.undo()
    assert find_plugins() is before


def test_plugins_of_installed_distributions_register_entries(tmp_path):
    """A pip-installed schedule is known to every command; a broken plug-in is named and left out."""
    _install_plugin(
        tmp_path,
        "mirrored",
        "mirrored_schedule",
        "from penstock.schedule.catalogue import register, schedule\n"
        "@register('mirrored-gpipe', synchronous=True, stages_per_rank='1',\n"
        "          splits_backward=False, source='a plug-in')\n"
        "def mirrored(stages, micro_batches):\n"
        "    return schedule('gpipe', stages, micro_batches)\n",
    )
    _install_plugin(tmp_path, "broken", "broken_plugin", "raise OSError('no licence file')\n")
    listed = subprocess.run(
        [sys.executable, "-m", "penstock", "list", "schedules"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr
    assert "mirrored-gpipe" in listed.stdout
    assert "the plug-in broken (broken_plugin) cannot be imported: OSError" in listed.stderr
