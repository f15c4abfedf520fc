"""Parts that all pages share.

- `text.py`: formats of numbers and times, and line breaks in long names
- `navigation.py`: menu and tabs
- `assets.py`: static files, with plotly.js
"""
