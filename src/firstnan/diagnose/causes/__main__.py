"""`python -m firstnan.diagnose.causes docs/causes` writes the documentation pages."""

from __future__ import annotations

import sys
from pathlib import Path

from firstnan.diagnose.causes import documents

folder = Path(sys.argv[1])
for old in folder.glob("*.md"):
    old.unlink()
for name, text in documents().items():
    (folder / name).write_text(text, encoding="utf-8")
