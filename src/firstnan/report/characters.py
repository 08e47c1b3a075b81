"""Text that is safe to print in the encoding of a terminal or file."""

from __future__ import annotations

import unicodedata

_GLYPHS = "…│•▁▂▃▄▅▆▇█"
_TO_ASCII = str.maketrans({"…": "...", "│": "|", "•": "*", "→": "->", "×": "x", "–": "-", "—": "-", "“": '"', "”": '"'})
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Charset:
    """Turns any text into text that is safe to print in `encoding`: it cannot move the cursor or change colors."""

    def __init__(self, encoding: str = "utf-8") -> None:
        try:
            _GLYPHS.encode(encoding)
        except UnicodeEncodeError:
            self.plain = True
        except LookupError:  # an encoding that Python does not know
            self.plain, encoding = True, "ascii"
        else:
            self.plain = False
        self._encoding = encoding
        self.bar = "|" if self.plain else "│"
        self.bullet = "*" if self.plain else "•"
        self.ellipsis = "..." if self.plain else "…"
        self.spark = "_.-:=+*#" if self.plain else "▁▂▃▄▅▆▇█"

    def show(self, text: str) -> str:
        """`text` with unprintable characters escaped."""
        if text.isascii() and text.isprintable():
            return text
        if self.plain:
            text = text.translate(_TO_ASCII)
        text = "".join(_escape(c) if _unsafe(c) else c for c in text)
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def prose(self, text: str, limit: int = 700) -> str:
        """`text` on one line, without runs of spaces, cut at `limit`."""
        return self.cut(self.show(" ".join(text[: 4 * limit].split())), limit)

    def cut(self, text: str, limit: int) -> str:
        return text if len(text) <= limit else text[: max(0, limit - len(self.ellipsis))].rstrip(" .…") + self.ellipsis

    def path_end(self, path: str, most: int) -> str:
        """A layer's path, cut at the start: its end says more."""
        shown = self.show(path)
        return shown if len(shown) <= most else self.ellipsis + shown[len(self.ellipsis) - most :]


def _unsafe(char: str) -> bool:
    """Control characters (escape sequences too), lone surrogates, line separators, and marks that reorder text."""
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
