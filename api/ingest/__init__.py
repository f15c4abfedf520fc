"""What runs report, into the store."""
