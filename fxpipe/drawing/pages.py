"""A page of HTML that needs nothing else, and asks nobody else for anything: its content security policy forbids it.

It can be mailed, opened from a disk, and kept.
"""

from __future__ import annotations

from fxpipe.drawing.svg import escaped

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page_of(title: str, style: str, body: str, script: str) -> str:
    """The text of the file. `title` is text; the others stand in it as they are."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
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
