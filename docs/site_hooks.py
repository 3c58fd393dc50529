"""Hooks of mkdocs: the site has the repository's own pages, and the files that pages link to outside of docs/.

Links are written as GitHub resolves them. Where one leaves docs/, the file that it names is copied into the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")


def on_files(files: Files, config) -> Files:
    """Adds the repository's pages, and all files outside of docs/ that a page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        for link in _LINK.finditer(file.content_string):
            target = _target(file.src_uri, link[2])
            if _is_copied(target) and files.get_file_from_path(_place(target)) is None:
                files.append(File.generated(config, _place(target), abs_src_path=str(_file(target))))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Links as they are in the site."""
    here = page.file.src_uri

    def in_site(link: re.Match) -> str:
        target = _target(here, link[2])
        if not (ROOT / target).exists():
            return link[0]
        place = posixpath.relpath(_place(target), posixpath.dirname(here) or ".")
        return f"{link[1]}{place}{link[3] or ''}{link[4]}"

    return _LINK.sub(in_site, markdown)


def _target(page: str, link: str) -> str:
    """The path in the repository to which a page of the site links."""
    source = SOURCES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _is_copied(target: str) -> bool:
    return target not in PAGES and not target.startswith("docs/") and _file(target).is_file()


def _file(target: str) -> Path:
    """The file to show for a path; of a folder ``train.py``, else its first script."""
    path = ROOT / target
    return (path / "train.py" if (path / "train.py").exists() else min(path.glob("*.py"))) if path.is_dir() else path


def _place(target: str) -> str:
    """Where a path of the repository is in the site."""
    if target in PAGES:
        return PAGES[target]
    return (
        target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{_file(target).relative_to(ROOT)}"
    )
