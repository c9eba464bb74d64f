"""Acceptance, speed, losslessness, parity."""
