"""What `rhyme serve --demo` shows."""
