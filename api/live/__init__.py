"""Live streams."""
