"""Live streams, independent of HTTP.

`news.py` wakes streams when this service stores events, `shared_polling.py` polls for all other changes once for all
streams, and `streams.py` has the streams of events, logs and runs.
"""
