"""For mkdocs: pages link to files of the repository, as `../SECURITY.md`; the site gets these files as plain text.

A link to a file that does not exist is left as it is, and fails the strict build.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {path for page in DOCS.glob("*.md") for path in OUTSIDE.findall(page.read_text())}
    for path in sorted(linked):
        if (source := DOCS.parent / path).is_file():
            files.append(File.generated(config, f"source/{path}.txt", content=source.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def shown(link: re.Match[str]) -> str:
        return f"](source/{link[1]}.txt)" if files.get_file_from_path(f"source/{link[1]}.txt") else link[0]

    return OUTSIDE.sub(shown, markdown)
