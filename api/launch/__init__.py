"""Runs that this service starts."""
