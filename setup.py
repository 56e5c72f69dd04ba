"""The description of the package for an index: README.md without its links to files.

Everything else about the package stands in pyproject.toml. On a package index, links to files of
the repository lead nowhere, and the project has no address that they could be completed with.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

#: A picture or a link, whose target is no web address. Its text may hold code, and no brackets.
_LOCAL = r"\]\((?![a-z]+://)[^)\s]+\)"
_PICTURE = re.compile(rf"^!\[[^\]]*{_LOCAL}\n+", re.MULTILINE)
_LINK = re.compile(rf"\[([^\]]*){_LOCAL}")


def description(readme: str) -> str:
    """Return the text of a page without local pictures, and with local links as their text."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


if __name__ == "__main__":
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(text), long_description_content_type="text/markdown")
