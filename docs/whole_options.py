"""Keeps each `--option` of a page in one piece: browsers break a line after its hyphens."""

from __future__ import annotations

import re

_CODE = re.compile(r"<code.*?</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")


def on_page_content(html: str, **_: object) -> str:
    """Mark the options in the code of a page, for site.css; called by mkdocs."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
