"""Hooks of the site: files of the repository that a page links to become part of the site.

On a code host, `../src/penstock/event.py` in a page of `docs/` leads to the file. The site has only
`docs/`, so every such file is copied to `repository/`: Markdown as a page, the rest as text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: Folder of the site for files from outside of docs/.
MIRROR = "repository"
#: The page that draws all schedules would take the address of the folder's README.
RENAMED = {"docs/gallery/index.html": "gallery/drawings.html"}

#: Fenced blocks and code in a line: brackets there are no links.
_CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1[ ]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\(\s*<?|(?:src|href)=\")([^)>\s\"#]+)")
_LIST_ITEM = re.compile(r"(?:[-*] |\d+\. )")


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the links of a page to files; group 2 is the path."""
    code = [match.span() for match in _CODE.finditer(text)]
    for match in _LINK.finditer(text):
        in_code = any(start <= match.start() < end for start, end in code)
        if not in_code and not re.match(r"[a-z][a-z+.-]*:", match[2]):
            yield match


def target_of(page: str, link: str) -> str:
    """Return the path from the root of the repository to which a link of a page leads.

    Args:
        page: path of the page from the root of the repository.
        link: the link without its anchor.
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def site_path(path: str) -> str:
    """Return where a file of the repository stands in the site, from the site's root."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{MIRROR}/{path}/files.md"
    return f"{MIRROR}/{path}" if path.endswith(".md") else f"{MIRROR}/{path}.txt"


def repository_path(site: str) -> str:
    """Return the path from the root of the repository of a Markdown page of the site."""
    if site.startswith(f"{MIRROR}/"):
        return site.removeprefix(f"{MIRROR}/")
    return f"docs/{site}"


def linked_files() -> set[str]:
    """Return the files and folders outside of docs/ to which pages lead, also by way of others."""
    pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    found: set[str] = set()
    while pages:
        page = pages.pop()
        text = (ROOT / page).read_text(encoding="utf-8")
        targets = {target_of(page, match[2]) for match in links(text)}
        new = {path for path in targets if _is_outside(path)} - found
        found |= new
        pages += [path for path in new if path.endswith(".md")]
    return found


def _is_outside(path: str) -> bool:
    """Whether a path is a file of the repository that is not in docs/."""
    return not path.startswith(("docs/", "..")) and (ROOT / path).exists()


def _content(path: str) -> str:
    """Return what the site shows of a file or folder of the repository."""
    full = ROOT / path
    if not full.is_dir():
        return full.read_text(encoding="utf-8")
    names = sorted(entry.name for entry in full.iterdir() if not entry.name.startswith("__"))
    return f"# {path}\n\nThe files of this folder:\n\n" + "\n".join(f"- `{name}`" for name in names)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of docs/ that the navigation does not name to its second section."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^\s+- (\S+\.md)$", text, re.MULTILINE))
    unnamed = {path.name for path in (ROOT / "docs").glob("*.md")} - named
    sections: list[dict[str, list[str]]] = config.nav or []
    sections[1]["How to"] += sorted(unnamed)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ to the site, and leave them out of its navigation."""
    for path in sorted(linked_files()):
        full = ROOT / path
        place = site_path(path)
        if full.suffix in (".png", ".svg"):
            place = f"{MIRROR}/{path}"
            file = File.generated(config, place, abs_src_path=str(full))
        else:
            file = File.generated(config, place, content=_content(path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    for path, place in RENAMED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead the links of a page to where their files stand in the site."""
    source = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    parts = []
    end = 0
    for match in links(markdown):
        target = target_of(source, match[2])
        parts.append(markdown[end : match.start(2)])
        parts.append(_relative(target, folder) if target != "." else match[2])
        end = match.end(2)
    return separate_lists("".join([*parts, markdown[end:]]))


def _relative(target: str, folder: str) -> str:
    """Return the link from a folder of the site to a file of the repository."""
    place = site_path(target)
    if (ROOT / target).suffix in (".png", ".svg") and not target.startswith("docs/"):
        place = f"{MIRROR}/{target}"
    return posixpath.relpath(place, folder or ".")


def separate_lists(markdown: str) -> str:
    """Put an empty line before each list: Python-Markdown needs one, GitHub does not."""
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        previous = lines[-1] if lines else ""
        starts_list = _LIST_ITEM.match(line) and not _LIST_ITEM.match(previous)
        after_text = bool(previous.strip()) and not previous.startswith(" ")
        if starts_list and after_text and not in_code and not _inside_list(lines):
            lines.append("")
        if line.startswith("```"):
            in_code = not in_code
        lines.append(line)
    return "\n".join(lines)


def _inside_list(lines: list[str]) -> bool:
    """Whether the paragraph that ends with these lines began as an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _LIST_ITEM.match(line):
            return True
    return False
