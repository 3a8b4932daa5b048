"""Trains for long, with saves, evaluation, resumes and changes of the number of ranks at random: `make soak`."""
