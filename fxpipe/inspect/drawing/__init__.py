"""Pictures as data, and what makes SVG, PNG and PDF of them."""
