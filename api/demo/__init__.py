"""Content of `rhyme serve --demo`.

- `demonstration.py`: fills the store with recorded runs
- `replay.py`: replays one recorded run
- `recording.py`: packs runs into one file
- `synthetic_run.py`: makes events of a run that never happened
"""
