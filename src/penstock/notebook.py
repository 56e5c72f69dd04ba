"""How values show themselves in notebooks. They stand above the room that draws and may not name
it: it is handed to them.

The front door, which stands below both, does so (`Shown.drawn_by`), and loads the drawing room when
the first picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A value that has a picture. Jupyter asks for `_repr_svg_` and shows the value's text where
    that is None.
    """

    drawn_by: ClassVar[Callable[[Any], str | None]] = staticmethod(lambda _: None)

    def _repr_svg_(self) -> str | None:
        """The picture as SVG; None if there is none, or it would be too large."""
        return type(self).drawn_by(self)
