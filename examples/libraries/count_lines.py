"""Count the lines of the programs beside this file.

Shows: how many lines a library takes to start.
Story: `python count_lines.py`. A line counts if it holds code: blank lines, lines with nothing but
    a comment, and docstrings do not count. A statement over several lines counts as that many;
    all programs have the layout of one formatter. Imports count, and have a column of their own.
    "new" counts the lines that plain training does not have.
Takes: less than a second.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Programs in the order of the tables, by library.
PROGRAMS = {
    "plain": "train_plain.py",
    "torchgpipe": "train_torchgpipe.py",
    "FairScale": "train_fairscale.py",
    "DeepSpeed": "train_deepspeed.py",
    "torch.distributed.pipelining": "train_torch_pipelining.py",
    "Penstock, Pipe": "train_penstock_pipe.py",
    "Penstock, Pipeline": "train_penstock.py",
}
_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True)
class LineCount:
    """Lines of a program.

    Attributes:
        code: lines with code, imports included.
        imports: lines of import statements.
        new: lines with code that the program for plain training does not have.
    """

    code: int
    imports: int
    new: int


def code_lines(text: str) -> list[int]:
    """Return the numbers of the lines with code, from 1."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            rows.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return sorted(rows)


def count_lines(text: str, plain: str) -> LineCount:
    """Count the lines of a program.

    Args:
        text: the program.
        plain: the program for plain training.
    """
    imports = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports += (node.end_lineno or node.lineno) - node.lineno + 1
    code = _code_of(text)
    new = sum((code - _code_of(plain)).values())
    return LineCount(sum(code.values()), imports, new)


def _code_of(text: str) -> Counter[str]:
    """Return the lines with code without indentation, and how often each occurs."""
    lines = text.splitlines()
    return Counter(lines[row - 1].strip() for row in code_lines(text))


def count_programs() -> dict[str, LineCount]:
    """Return the counts of all programs, by library."""
    texts = {name: (HERE / file).read_text(encoding="utf-8") for name, file in PROGRAMS.items()}
    return {name: count_lines(text, texts["plain"]) for name, text in texts.items()}


if __name__ == "__main__":
    print(f"{'library':30}{'lines':>6}{'imports':>9}{'new':>5}")
    for library, count in count_programs().items():
        print(f"{library:30}{count.code:6}{count.imports:9}{count.new:5}")
