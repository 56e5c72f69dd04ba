"""Display values in Jupyter notebooks: pictures as SVG, descriptions as text.

Layering: the packages of the values (`event`, `schedule`) must not import `penstock.draw`, which
imports them. So `penstock/__init__.py`, which may import both, sets `NotebookPicture.svg_drawer`,
and imports `penstock.draw` when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, ClassVar


class NotebookText:
    """Base class of values that a notebook shows as `print` does."""

    def _repr_html_(self) -> str:
        """Return the text in a fixed-width font."""
        return f"<pre>{escape(str(self))}</pre>"


class NotebookPicture:
    """Base class of values with a picture.

    Jupyter calls `_repr_svg_`, and displays the value's `repr` if that returns None.
    """

    svg_drawer: ClassVar[Callable[[Any], str | None]] = staticmethod(lambda _: None)

    def _repr_svg_(self) -> str | None:
        """Return the picture as SVG; None if there is none, or it would be too large."""
        return type(self).svg_drawer(self)
