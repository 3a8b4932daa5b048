"""Config files of other tools: read, written, and translated into each other through the one config.

    a file            open it: plain data, and the line of each key                  source.py
    Source            read it: what each key says (`Entry`), and the config          format.py, reading.py
    ReadDocument      write that in another tool's words, field by field             the format's folder
    RenderedDocument  what became of each key (`Item`)                               items.py
    Join              read it back, and join by field: said, written, meant there    readback.py
    Outcome           the text, and the report on it                                 translating.py

`--drop` takes keys out of the source, and `--with` fills what the reading leaves open (dropping.py, filling.py). A
format knows which engines its tool drives; the rest of the core knows no engine by name.
"""

from __future__ import annotations

from unishard.formats.catalog import NAMES
from unishard.formats.checking import check
from unishard.formats.items import Item
from unishard.formats.reading import ReadDocument
from unishard.formats.translating import Outcome, read, translate

__all__ = ["NAMES", "Item", "Outcome", "ReadDocument", "check", "read", "translate"]
