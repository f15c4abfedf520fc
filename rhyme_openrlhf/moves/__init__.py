"""Moving a running sample from one engine to another (docs/moves.md)."""
