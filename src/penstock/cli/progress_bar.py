"""Progress bars on standard error, which only a terminal shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


def stderr_console() -> Console:
    """Return a console on standard error."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def measuring_bar(*, visible: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar for a measurement.

    Yields:
        A function of the number of steps done, their total, and what is measured.
    """
    from rich.progress import Progress

    console = stderr_console()
    # Redrawn at each step only: a thread that redraws it would distort the measurement.
    with Progress(
        console=console,
        transient=True,
        disable=not (visible and console.is_terminal),
        auto_refresh=False,
    ) as bar:
        task = bar.add_task("measuring", total=None)

        def show_progress(completed: int, total: int, subject: str) -> None:
            """Update the bar."""
            bar.update(
                task,
                completed=completed,
                total=total,
                description=f"measuring {subject}",
                refresh=True,
            )

        yield show_progress


@contextmanager
def bar_with_lines(
    *columns: ProgressColumn, quiet: bool
) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Show a progress bar with lines above it, which are printed where there is no terminal too.

    Args:
        columns: of the bar.
        quiet: whether to show and print nothing.

    Yields:
        The bar, and a function that prints a line.
    """
    from rich.progress import Progress

    console = stderr_console()
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:

        def say(message: str) -> None:
            """Print a line."""
            if not quiet:
                console.print(message, highlight=False, markup=False, soft_wrap=True)

        yield bar, say
