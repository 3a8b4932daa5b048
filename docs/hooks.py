"""Brings the pages at the top of the checkout into the site, and leads links there.

mkdocs.yml names this file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "MAPPING.md": "mapping.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages by their path in the checkout, and their names in the site."""

_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder."""
    root = Path(config.config_file_path).parent
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of the checkout be right in the site, and show code in tables without
    GitHub's escapes of bars.
    """
    markdown = _CODE.sub(lambda match: match[0].replace("\\|", "|"), markdown)
    return _LINK.sub(lambda match: in_site(match[1], page.file.src_uri), markdown)


def in_site(target: str, page: str) -> str:
    """A link target of the checkout as one of the site, both relative to their page.

    Args:
        target: A path, without an anchor.
        page: The page's path in the site, such as `api/index.md`.
    """
    source = {name: outside for outside, name in OUTSIDE.items()}.get(
        page, f"docs/{page}"
    )
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    path = OUTSIDE.get(path, path.removeprefix("docs/"))
    return posixpath.relpath(path, posixpath.dirname(page) or ".")
