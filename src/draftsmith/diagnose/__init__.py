"""Causes of low acceptance, ranked, with evidence."""
