"""Files of up to 1 MB that mean far more than they are long, or take long to parse."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

__all__ = ["ABSURD", "in_archive", "nested_key", "shared_list"]

MEGABYTE = 10**6


def nested_key(depth: int = 60) -> bytes:
    """A pickle of a dictionary whose key is a tuple of 2^depth elements, each level being one tuple twice."""
    return (
        b"\x80\x02}("
        + b"K\x01\x85q\x00"
        + b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(depth))
        + b"K\x01u."
    )


def nested_tuple(depth: int = 60) -> bytes:
    """A pickle of such a tuple: its text has 2^depth elements too."""
    return b"\x80\x02K\x01\x85q\x00" + b"".join(b"0h%ch%c\x86q%c" % (at, at, at + 1) for at in range(depth)) + b"."


def shared_list(depth: int = 60) -> bytes:
    """A pickle of a list that means 2^depth elements."""
    return b"\x80\x02]q\x00" + b"".join(b"0]q%c(h%ch%ce" % (at + 1, at, at) for at in range(depth)) + b"."


def wide_list() -> bytes:
    """A pickle of a list that means 10^10 elements in two levels."""
    return b"\x80\x02]q\x00(" + b"N" * 100_000 + b"e0](" + b"h\x00" * 100_000 + b"e."


def set_of_tuples() -> bytes:
    return b"\x80\x02c__builtin__\nset\n" + nested_tuple()[2:-1] + b"]q\xf0h\x3ca\x85R."


def in_archive(data: bytes, compressed: bool = False) -> bytes:
    """A file as torch.save writes it, around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return file.getvalue()


def overlapping() -> bytes:
    """An archive of many entries that are one and the same record."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\0" * 500_000)
        entry = archive.infolist()[0]
        archive.filelist += [_renamed(entry, f"archive/{number}/data.pkl") for number in range(5000)]
    return file.getvalue()


def _renamed(entry: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    other = zipfile.ZipInfo(name)
    for field in ("header_offset", "file_size", "compress_size", "CRC"):
        setattr(other, field, getattr(entry, field))
    return other


def _tensor(size: bytes, function: bytes = b"_rebuild_tensor_v2") -> bytes:
    """A pickle of a dictionary with a tensor of one stored element."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n"
        + function
        + b"\n("
        + storage
        + b"K\x00"
        + size
        + b"K\x00\x85\x89}tRs."
    )


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


PICKLES: dict[str, Callable[[], bytes]] = {
    "a key of 2^60 elements": nested_key,
    "a tuple of 2^60 elements": nested_tuple,
    "a list of 2^60 elements": shared_list,
    "a list of 10^10 elements": wide_list,
    "a set of such a tuple": set_of_tuples,
    "an int of a megabyte": lambda: b"\x80\x02\x8b" + struct.pack("<i", MEGABYTE - 20) + b"\1" * (MEGABYTE - 20) + b".",
    "many marks": lambda: b"\x80\x02" + b"(" * MEGABYTE,
    "many lists": lambda: b"\x80\x02(" + b"]" * (MEGABYTE // 4) + b"l.",
    "nested lists": lambda: b"\x80\x02" + b"]" * (MEGABYTE // 4) + b"a" * (MEGABYTE // 4 - 9) + b".",
    "nested tuples": lambda: b"\x80\x02N" + b"\x85" * (MEGABYTE - 9) + b".",
    "a huge memo": lambda: b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a huge text": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "a tensor of 2^31 elements": lambda: _tensor(b"J\xff\xff\xff\x7f\x85"),
    "tensors of 2^24 elements": lambda: b"\x80\x02(" + _tensor(b"J\x00\x00\x00\x01\x85")[2:-1] * 5000 + b"l.",
}
ABSURD: dict[str, Callable[[], bytes]] = {
    **PICKLES,
    **{f"an archive with {name}": (lambda make=make: in_archive(make())) for name, make in PICKLES.items()},  # type: ignore[misc]
    "a compressed archive": lambda: in_archive(b"\0" * 2**28, compressed=True),
    "an archive of one record 5,000 times": overlapping,
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
"""Content by what it consists of."""
