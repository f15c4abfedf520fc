"""`rhyme profile`: measures decode steps and prefills of a run's own engine; the pure part is in `latency/`."""
