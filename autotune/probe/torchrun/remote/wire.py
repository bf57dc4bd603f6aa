"""Frames between the controller and its nodes: JSON in short lines of text, which srun and ssh carry whole.

srun joins the output of all nodes and keeps lines together up to 1,024 bytes, so longer frames go in several lines.
What else appears on the way (a banner, a warning of a login shell) is no frame and is passed over.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

Frame = dict[str, Any]

_MARK = b"autotune:frame"
_PART = 900
"""Bytes of a frame in one line: with the mark and the counters the line stays below srun's 1,024."""


def encode(frame: Frame, source: str) -> bytes:
    """A frame as lines.

    Args:
        frame: plain JSON types.
        source: who sends it, one word: lines of different sources may alternate.
    """
    text = base64.b64encode(zlib.compress(json.dumps(frame).encode()))
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    head = b"%s %s" % (_MARK, source.encode())
    return b"".join(b"%s %d %s\n" % (head, len(parts) - number, part) for number, part in enumerate(parts, 1))


class Decoder:
    """Puts frames together again from bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self._parts: dict[bytes, list[bytes]] = {}

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [frame for line in lines if (frame := self._line(line)) is not None]

    def _line(self, line: bytes) -> Frame | None:
        words = line.split(b" ")
        if len(words) != 4 or words[0] != _MARK:
            return None
        _, source, to_come, part = words
        parts = self._parts.setdefault(source, [])
        parts.append(part)
        if to_come != b"0":
            return None
        del self._parts[source]
        frame: Frame = json.loads(zlib.decompress(base64.b64decode(b"".join(parts))))
        return frame
