"""Prompts in, the target's own answers out, as token ids."""
