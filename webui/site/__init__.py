"""What all pages share: `text.py` (how numbers and times are written), `markup.py` (where long names may break),
`navigation.py` (menu and tabs), `assets.py` (static files) and `drawing_library.py` (plotly.js as pages get it).
"""
