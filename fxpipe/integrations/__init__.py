"""Integrations with trainers of other libraries, one file per library, not imported by `import fxpipe`."""
