"""What `rhyme serve --demo` shows: `demonstration.py` fills the store with recorded runs, `replay.py` plays one.

`recording.py` packs runs into one file; `synthetic_run.py` makes events of a run that never was.
"""
