"""What the pages of a run say of it, in words and small numbers: `recorded_settings.py`, `attempts.py`, `recent.py`,
`event_words.py`, `sparkline.py`.
"""
