"""How a request gets at the service: the service itself, and who is asking.

`service.py` (what the parts of one running service share), `auth.py` (the caller behind a token or session),
`launching.py` (what starts runs), `local_link.py` (sign-in links made on the service's own machine).
"""
