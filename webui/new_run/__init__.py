"""The form of a new run.

- `templates.py`: starting points
- `form.py`: every option exactly once
- `option_words.py`: one sentence on each option
- `estimates.py`: memory plan and simulated gain
"""
