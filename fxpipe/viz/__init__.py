"""Pictures as data, what makes SVG of them, and pieces of HTML and text that others put together."""
