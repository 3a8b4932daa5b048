"""Optimizers, parameter groups, learning rate schedules, loss scale."""
