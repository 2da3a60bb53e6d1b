"""Files that others may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file so that a reader, or a kill in between, finds the old text or the new one, never a part.

    Raises:
        OSError: the directory cannot be written; the old file stands.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
