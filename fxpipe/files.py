"""Files to be written: looked at before the long work, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fxpipe.errors import ArgumentError, ArgumentTypeError, FileError


def check_path(path: str | Path, formats: Sequence[str], what: str) -> str:
    """The format that `path` names by its suffix, in small letters. Nothing is written.

    Raises:
        ArgumentError: a suffix that is none of `formats`.
        FileError: a folder that is not there or may not be written to.
        ArgumentTypeError: not the path of a file.
    """
    place = _as_path(path)
    known = ", ".join(f".{name}" for name in formats)
    form = place.suffix.removeprefix(".").lower()
    if form not in formats:
        given = f"the suffix {place.suffix!r} names no format" if place.suffix else "a suffix must name the format"
        raise ArgumentError(f"{what} cannot be saved to {str(path)!r}: {given}; give one of {known}")
    folder = place.parent
    if place.is_dir():
        raise _refusal(what, path, "it is a directory; give the path of a file")
    if not folder.exists():
        raise _refusal(what, path, f"there is no directory {str(folder)!r}; make it first, or give another path")
    if not folder.is_dir():
        raise _refusal(what, path, f"{str(folder)!r} is no directory; give another path")
    if not os.access(place.resolve().parent, os.W_OK | os.X_OK):
        raise _refusal(what, path, f"the directory {str(folder)!r} may not be written to; give another path")
    if place.exists() and not os.access(place, os.W_OK):
        raise _refusal(what, path, "the file may not be written to; give another path")
    return form


def write_whole(path: str | Path, content: bytes, what: str) -> None:
    """Writes beside the file first: whoever looks sees the old one or the new one, and nothing half-written.

    Raises:
        FileError: it cannot be written.
        ArgumentTypeError: not the path of a file.
    """
    place = _as_path(path).resolve()  # what a link leads to is replaced, not the link
    part = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
        os.replace(part, place)
    except OSError as error:
        raise _refusal(what, path, f"{error.strerror or error}; give another path") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _as_path(given: str | Path) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ArgumentTypeError(f"path={given!r}: expected the path of a file, as str or pathlib.Path")
    return Path(given)


def _refusal(what: str, path: str | Path, why: str) -> FileError:
    return FileError(f"{what} cannot be saved to {str(path)!r}: {why}")
