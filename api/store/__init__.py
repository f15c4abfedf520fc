"""The store: tables, sessions, and what keeps them true and fast."""
