"""Which engine generates what, and when a running sample goes elsewhere: pure decisions (docs/scheduling.md)."""
