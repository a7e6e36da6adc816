"""What `make docs` adds to MkDocs.

Formulas become MathML, which browsers draw by themselves. Examples in docstrings become blocks of code. Source files
that a page links to become pages of the site.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".h": "cpp", ".cpp": "cpp", ".cu": "cpp"}
_LINK = re.compile(r"(?<=\]\()\.\./([\w/.-]+)(?=\))")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)


class _Examples(Preprocessor):
    """Puts fences around the examples of docstrings. An example begins with `>>>` and ends at an empty line."""

    def run(self, lines: list[str]) -> list[str]:
        fenced: list[str] = []
        inside = False
        for line in [*lines, ""]:
            if not inside and line.startswith(">>> "):
                fenced, inside = [*fenced, "```pycon"], True
            elif inside and not line.strip():
                fenced, inside = [*fenced, "```"], False
            fenced.append(line)
        return fenced


class _Docstrings(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Examples(md), "examples", priority=100)


def on_config(config: MkDocsConfig) -> None:
    extensions: list[Any] = config.markdown_extensions
    extensions.append(_Docstrings())


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file of the repository outside docs/ that a page of docs/ links to."""
    linked = {
        name for file in files.documentation_pages() if _in_docs(file) for name in _LINK.findall(file.content_string)
    }
    for name in sorted(linked):
        heading = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n"
        program = f"````{LANGUAGES.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text()}````\n"
        page = File.generated(config, f"source/{name}.md", content=heading + program)
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)


def _in_docs(file: File) -> bool:
    """Whether the page lies in docs/ itself, so that `../` leads from it to the root of the repository."""
    return "/" not in file.src_uri


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return _LINK.sub(r"source/\1.md", markdown) if _in_docs(page.file) else markdown


def on_page_content(content: str, **_: Any) -> str:
    return _FORMULA.sub(
        lambda found: _mathml(html.unescape(found[2]), "block" if found[1] == "div" else "inline"), content
    )


def _mathml(formula: str, display: str) -> str:
    """A formula as MathML. Browsers leave out spaces of a named width, and the space after the name of a function;
    these are added."""
    space = '<mspace width="0.17em" />'
    drawn = convert(formula, display=display).replace('<mspace width="thinmathspace" />', space)
    return drawn.replace("<mi>log</mi>", f"<mi>log</mi>{space}")
