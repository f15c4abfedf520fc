"""What a run says of itself: event schema, metric definitions, run record, terminal progress. Pure Python."""
