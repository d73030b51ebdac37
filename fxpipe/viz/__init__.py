"""Pictures as data, what makes SVG, PNG and PDF of them, and pieces of HTML and text that others put together."""
