"""Live streams: what a page is told as it happens, without any knowledge of HTTP.

`news.py` wakes streams when this service stores events, `shared_polling.py` looks for all other changes once for all
streams, `streams.py` has the streams of events, log pieces and runs.
"""
