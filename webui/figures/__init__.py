"""Figures: what each asks of the store, and how it is drawn."""
