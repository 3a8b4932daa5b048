"""`python -m unishard`: the command line, also in a checkout where nothing is installed."""

from unishard.cli import main

main()
