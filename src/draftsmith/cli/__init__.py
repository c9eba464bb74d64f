"""The command line: one thin file per command, found by name; main.py puts them together."""
