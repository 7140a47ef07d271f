"""Digests of files."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
