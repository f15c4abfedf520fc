"""What every request and every answer passes."""
