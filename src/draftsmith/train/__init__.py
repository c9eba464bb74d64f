"""Objective, loop, parallelism, checkpoints."""
