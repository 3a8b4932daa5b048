"""Config files of other tools: read, written, and translated into each other through the one config.

    a file            open it: plain data, and the line of each key                  files/
    Source            read it: what each key says (`Entry`), and the config          format.py, reading/
    ReadDocument      write that in another tool's words, field by field             the format's folder
    RenderedDocument  what became of each key (`Item`)                               report/
    Join              read it back, and join by field: said, written, meant there    report/
    Outcome           the text, and the report on it                                 translating.py

`--drop` takes keys out of the source (reading/dropping.py), and `--with` fills what the reading leaves open (beside/).
A format knows which engines its tool drives; the rest of the core knows no engine by name. What formats share about
that is in engines/, about processes in launch/, about words that stay in writing/, and about refusals in advice/.
"""

from __future__ import annotations

from unishard.formats.advice.checking import check
from unishard.formats.catalog import NAMES
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.items import Item
from unishard.formats.translating import Outcome, read, translate

__all__ = ["NAMES", "Item", "Outcome", "ReadDocument", "check", "read", "translate"]
