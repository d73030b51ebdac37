"""What a plan looks like: tables for people, a document for programs, `python -m fxpipe.inspect` for both."""
