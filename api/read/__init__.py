"""Questions about what is stored. Only reads."""
