"""What the pages of a run say of it."""
