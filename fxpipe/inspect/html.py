"""HTML of pages and of notebook views. All text passes through `escape_markup`: a module can be named `<script>`."""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.inspect.svg import escape_markup


def list_markup(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape_markup(line)}</li>" for line in lines) + "\n</ul>"


# A page needs no other file and no network, and its content security policy forbids them.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(title: str, style: str, body: str, script: str) -> str:
    """Formats a page. `title` is text, `style` CSS, `body` markup, `script` JavaScript."""
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


# Notebook views have no style sheet, which would change the notebook's page, and no script, which it might refuse. They
# use the page's colours, and so are legible on light and dark.


def notebook_view(title: str, facts: str, *parts: str) -> str:
    """Formats a view: a title, a line of facts, and parts as markup."""
    return f"<div><div><b>{escape_markup(title)}</b></div>{notebook_note(facts)}{''.join(parts)}</div>"


def notebook_note(line: str) -> str:
    return f'<div style="opacity:.75">{escape_markup(line)}</div>'


def notebook_picture(svg: str) -> str:
    """Puts a picture on a white background."""
    return f'<div style="overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0">{svg}</div>'
