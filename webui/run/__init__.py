"""Facts about one run that several of its pages show, as words and small numbers.

Modules: `recorded_settings.py`, `recent.py`, `event_words.py`, `sparkline.py`.
"""
