"""The form of a new run: `templates.py` (what to start from), `form.py` (every option once), `option_words.py` (what an
option is for), `estimates.py` (memory plan and simulated gain).
"""
