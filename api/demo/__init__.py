"""What `rhyme serve --demo` shows: `demonstration.py` fills the store with recorded runs, `replay.py` plays one."""
