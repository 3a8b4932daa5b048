"""Files of up to 1 MB that mean far more than they are long, or take long to parse."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

__all__ = ["ABSURD"]

MEGABYTE = 10**6


def _compressed() -> bytes:
    """A file as torch.save writes it, but compressed, around a pickle of 256 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**28)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return file.getvalue()


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


ABSURD: dict[str, Callable[[], bytes]] = {
    "a compressed archive": _compressed,
    "brackets": lambda: b"[" * MEGABYTE,
    "braces": lambda: b'{"a":' * (MEGABYTE // 5),
    "pairs of brackets": lambda: b"[" + b"[]," * (MEGABYTE // 3 - 1) + b"[]]",
    "objects": lambda: b'{"a":[' + b"{}," * (MEGABYTE // 3 - 4) + b"{}]}",
    "keys": lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(80_000)) + b"}",
    "keys of a section": lambda: (
        b'{"zero_optimization": {' + b",".join(b'"k%d":1' % number for number in range(40_000)) + b"}}"
    ),
    "lines of keys": lambda: b"".join(b"k%d: 1\n" % number for number in range(90_000)),
    "digits": lambda: b"9" * MEGABYTE,
    "a key of digits": lambda: b'{"step": ' + b"9" * (MEGABYTE - 20) + b"}",
    "a float of digits": lambda: b"a: 1." + b"9" * (MEGABYTE - 20),
    "an exponent": lambda: b'{"a": 1e999999999}',
    "a text": lambda: b'"' + b"a" * MEGABYTE + b'"',
    "an open quote": lambda: b'a: "' + b"a " * (MEGABYTE // 2 - 4),
    "escapes": lambda: b'"' + b"\\n" * (MEGABYTE // 2 - 4) + b'"',
    "spaces": lambda: b"a: b" + b" " * MEGABYTE + b"c",
    "empty lines": lambda: b"\n" * MEGABYTE,
    "comments": lambda: b"# a\n" * (MEGABYTE // 4),
    "a comment": lambda: b"#" * MEGABYTE,
    "aliases": lambda: b"a: &a [x]\nb: [" + b"*a," * (MEGABYTE // 3 - 10) + b"*a]\n",
    "aliases of aliases": lambda: (
        b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n + 1, n + 1, n, n) for n in range(60))
    ),
    "merges of merges": lambda: (
        b"a0: &a0 {x: 1}\n" + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n + 1, n + 1, n, n) for n in range(60))
    ),
    "anchors": lambda: b"&a " * (MEGABYTE // 3),
    "question marks": lambda: b"? " * (MEGABYTE // 2),
    "dashes": lambda: b"- " * (MEGABYTE // 2),
    "tags": lambda: b"!" * MEGABYTE,
    "colons": lambda: b"a: " * (MEGABYTE // 3),
    "words": lambda: b"a " * (MEGABYTE // 2),
    "dots": lambda: b"a." * (MEGABYTE // 2) + b"a = 1",
    "tables": lambda: b"".join(b"[a%d.b]\nc = 1\n" % number for number in range(50_000)),
    "tables of tables": lambda: (
        b"[" + b"a." * 90 + b"a]\n" + b"".join(b"[" + b"a." * 90 + b"b%d]\n" % n for n in range(4000))
    ),
    "arrays of tables": lambda: b"[[a]]\n" * (MEGABYTE // 6),
    "inline tables": lambda: b"a = " + b"{a = " * 3000,
    "parentheses": lambda: b"(" * MEGABYTE,
    "sums": lambda: b"x = 1" + b" + 1" * (MEGABYTE // 4 - 4),
    "substitutions": lambda: b"echo " + b"$(" * (MEGABYTE // 2 - 4),
    "quotes": lambda: b"'\"" * (MEGABYTE // 2),
    "backslashes": lambda: b"\\\n" * (MEGABYTE // 2),
    "placeholders": lambda: b"a: " + b"{{" * (MEGABYTE // 2 - 4),
    "variables": lambda: b"a: " + b"${" * (MEGABYTE // 2 - 4),
    "statements": lambda: b"{% if" * (MEGABYTE // 5),
    "hosts": lambda: b"".join(b"h%d slots=999999999\n" % number for number in range(45_000)),
    "a range": lambda: b"h[0-999999999] slots=4\n",
    "records": lambda: b'{"step": 1, "loss": 1.0}\n' * (MEGABYTE // 25),
    "records of new steps": lambda: b"".join(b'{"step": %d, "loss": 1.0}\n' % n for n in range(30_000)),
    "headers": lambda: _safetensors(
        b"{"
        + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(18_000))
        + b"}"
    ),
    "a header of brackets": lambda: _safetensors(b"[" * (MEGABYTE - 8)),
    "NUL bytes": lambda: b"\0" * MEGABYTE,
    "no UTF-8": lambda: b"\x80" * MEGABYTE,
}
"""Content by what it consists of. Pickles are not held to this: one may mean any number of elements."""
