"""Who is told of an event: the listeners that override it."""

from __future__ import annotations

from collections.abc import Iterable


class Listeners:
    """By event, what each listener does that overrides it, in the order of the listeners; the loop calls them in turn.

    Events are the public methods of the class that all listeners have; a subclass of this one has a list for each.
    """

    def __init__(self, kind: type, listeners: Iterable[object]) -> None:
        """Find them.

        Args:
            kind: The class that all listeners have, whose methods do nothing.
            listeners: In the order in which they are told.
        """
        told = [*listeners]
        for event, nothing in vars(kind).items():
            if callable(nothing) and not event.startswith("_"):
                tells = [getattr(each, event) for each in told if getattr(type(each), event) is not nothing]
                setattr(self, event, tells)
