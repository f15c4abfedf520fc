"""HTTP: the parts that every request and every response passes through.

- `server.py`: uvicorn
- `guard.py`, `limits.py`: checks of hosts, origins, sizes, times and rates
- `security_headers.py`: headers for browsers
- `problems.py`: errors as RFC 9457
- `fields.py`: parameters: types, edits with If-Match, unknown names
- `event_stream.py`: server-sent events
- `service_metrics.py`: metrics for Prometheus
"""
