"""The site: every page is in it once, every link leads somewhere, and nothing comes from the network."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from tests.support import needs

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _listed(nav: list[Any]) -> list[str]:
    entries = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in nav]
    return [page for entry in entries for page in ([entry] if isinstance(entry, str) else _listed(entry))]


def test_every_page_is_in_the_navigation_once() -> None:
    config = msgspec.yaml.decode((REPOSITORY / "mkdocs.yml").read_bytes())
    assert sorted(_listed(config["nav"])) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    found = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in found if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("images/*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_complete_and_readable_in_the_dark(picture: Path) -> None:
    text = picture.read_text()
    ElementTree.fromstring(text)  # noqa: S314 - a file of ours
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(find_spec("mkdocs") is None, reason=needs.package("docs"))
@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "max_staleness" in (tmp_path / "api" / "settings.html").read_text()  # made from the source
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="https?://')
    assert [page for page in tmp_path.rglob("*.html") if loaded.search(page.read_text())] == []
