"""Who does what when: a step as a picture, as a page to zoom in, and in the terminal."""
