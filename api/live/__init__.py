"""Live streams, independent of HTTP.

`shared_polling.py` wakes streams: by `News` when this service stores events, and by polling for all other changes once
for all streams. `streams.py` has the streams of events, logs and runs.
"""
