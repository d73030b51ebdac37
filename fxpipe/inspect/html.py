"""HTML of pages and of notebook views: text that cannot become markup.

All text passes through `escape_markup`: names of modules, source lines and devices are the user's, and a module may be
called `<script>`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.inspect.svg import escape_markup


def list_markup(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape_markup(line)}</li>" for line in lines) + "\n</ul>"


# A page needs no other file and no network, which its content security policy forbids: it can be mailed, opened from a
# disk, and kept.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(title: str, style: str, body: str, script: str) -> str:
    """The text of the file. `title` is text; the others are markup, CSS and a script."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape_markup(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


# Views of values in notebooks are parts of a page of the notebook's. They have no style sheet, which would change that
# page, and no script, which it may refuse. Colours are the page's, so they are legible on light and dark.


def notebook_view(title: str, facts: str, *parts: str) -> str:
    """The view of a value: a title, a line of facts, and parts as markup."""
    return f"<div><div><b>{escape_markup(title)}</b></div>{notebook_note(facts)}{''.join(parts)}</div>"


def notebook_note(line: str) -> str:
    """Formats a line in a fainter colour."""
    return f'<div style="opacity:.75">{escape_markup(line)}</div>'


def notebook_picture(svg: str) -> str:
    """Puts a picture on white, whatever colour the page has."""
    return f'<div style="overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0">{svg}</div>'
