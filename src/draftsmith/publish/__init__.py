"""Giving a drafter away: its files with a model card made from the run's records, to a folder or a hub repository."""
