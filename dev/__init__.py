"""Writes the pages that are made from the code or from measurements. It is part of the checkout, not of the wheel."""
