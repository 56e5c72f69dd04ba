"""Code of the user is imported and called, and its errors show the user's lines alone."""

from __future__ import annotations

import pytest
from tests.training.user_modules import write_module

from penstock.errors import SettingError
from penstock.training.sources.user_code import call_factory, is_reference, load_attribute


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_model:make", True),
        ("package.module:Class.method", True),
        ("text:book.txt", True),
        ("text:/tmp/book.txt", False),
        ("hf:config.json", True),
        ("vgg11", False),
        (":make", False),
        ("module:", False),
        ("2module:make", False),
    ],
)
def test_a_reference_is_a_module_and_an_attribute(text, expected):
    """Names of the zoo and paths must not be imported; prefixes are looked at before."""
    assert is_reference(text) is expected


def test_a_module_in_the_current_folder_is_imported(monkeypatch, tmp_path):
    """As `python -m` does: no PYTHONPATH is needed."""
    name = write_module("class A:\n    value = 3\n", monkeypatch, tmp_path)
    assert load_attribute(f"{name}:A.value", "--model") == 3


def test_an_attribute_of_a_number_is_one_line(monkeypatch, tmp_path):
    """A number has no attributes of its own to name."""
    name = write_module("class A:\n    value = 3\n", monkeypatch, tmp_path)
    with pytest.raises(SettingError, match=rf"{name} has no 'make'$"):
        load_attribute(f"{name}:A.value.make", "--model")


def test_a_missing_module_or_attribute_is_one_line(monkeypatch, tmp_path):
    """The usual typos."""
    name = write_module("def make():\n    return 1\n", monkeypatch, tmp_path)
    with pytest.raises(SettingError, match=r"^--model no_such:make: there is no module 'no_such'"):
        load_attribute("no_such:make", "--model")
    with pytest.raises(SettingError, match=rf"{name} has no 'mak'; it has make$"):
        load_attribute(f"{name}:mak", "--model")
    with pytest.raises(SettingError, match=r"write package\.module:attribute"):
        load_attribute("my model:make", "--model")


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named", "line 1, in <module>"),
        ("def make(:\n", "SyntaxError", r"line 1: def make\(:"),
        ("x = 1\nx / 0\n", "ZeroDivisionError: division by zero", r"line 2.*: x / 0"),
    ],
)
def test_an_exception_while_the_module_is_imported_shows_its_line(
    text, message, line, monkeypatch, tmp_path
):
    """Penstock's own frames and those of importlib would hide it."""
    name = write_module(text, monkeypatch, tmp_path)
    with pytest.raises(SettingError, match=message) as caught:
        load_attribute(f"{name}:make", "--model")
    assert caught.match(line)
    assert "importlib" not in str(caught.value)
    assert "user_code.py" not in str(caught.value)


def test_an_exception_in_the_factory_shows_the_lines_of_the_user(monkeypatch, tmp_path):
    """From the factory down to the line that raised, and nothing of the libraries in between."""
    text = """
        import json

        def make():
            return parse("{")

        def parse(text):
            return json.loads(text)
    """
    name = write_module(text, monkeypatch, tmp_path)
    factory = load_attribute(f"{name}:make", "--model")
    with pytest.raises(SettingError, match="raised JSONDecodeError: Expecting") as caught:
        call_factory(factory, f"{name}:make", "--model", {}, {})
    lines = str(caught.value).splitlines()
    assert [line.rpartition(", in ")[2] for line in lines[1:]] == [
        'make: return parse("{")',
        "parse: return json.loads(text)",
    ]


def make(classes, width=4, *, depth=1):
    """A factory that returns its arguments."""
    return classes, width, depth


def test_parameters_without_a_default_get_what_is_available():
    """The number of classes is known from the data; a default of the user's is left alone."""
    available = {"classes": 10, "width": 99}
    assert call_factory(make, "m:make", "--model", {"depth": 2}, available) == (10, 4, 2)


def test_unknown_and_missing_options_are_refused_by_name():
    """A misspelt option must not be ignored."""
    with pytest.raises(SettingError, match=r"has no option 'widht'; it has classes, width, depth"):
        call_factory(make, "m:make", "--model", {"widht": 2}, {"classes": 1})
    with pytest.raises(SettingError, match="set it by --model-option classes=VALUE"):
        call_factory(make, "m:make", "--model", {}, {})
    with pytest.raises(SettingError, match="is not a function but of type int"):
        call_factory(3, "m:make", "--model", {}, {})


def test_a_factory_with_keyword_arguments_takes_every_option():
    """`**options` says so."""
    returned = call_factory(lambda **options: options, "m:f", "--model", {"a": 1}, {"classes": 2})
    assert returned == {"a": 1}
