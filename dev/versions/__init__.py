"""Installs other versions of the packages, and runs a spanning part of the suite with each: `make versions`."""
