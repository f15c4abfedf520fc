"""What every request and every answer passes, whatever is asked.

`server.py` (uvicorn), `guard.py` (hosts, origins, sizes, times, rates) with `limits.py`, `security_headers.py`,
`problems.py` (errors as RFC 9457), `fields.py` (types of paths and queries), `event_stream.py` (server-sent events),
`service_metrics.py` (Prometheus).
"""
