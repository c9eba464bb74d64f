"""draftsmith: make an EAGLE-3 draft model and prove that it works in the engine that will serve it."""

__version__ = "0.1.0"
