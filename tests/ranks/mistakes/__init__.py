"""Mistakes that people make, by subject, with what unishard does about each: docs/mistakes.md is written from them."""

from __future__ import annotations

from mistakes.loop import LOOP

SUBJECTS = (LOOP,)
