"""The form of a new run."""
