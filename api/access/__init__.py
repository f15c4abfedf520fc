"""Access to the service: the service object, and authentication of requests.

- `service.py`: objects that the parts of a running service share
- `auth.py`: the user behind a token or session
- `openid.py`: sign-in with an OpenID Connect provider
- `launching.py`: the object that starts runs
- `local_link.py`: sign-in links made on the service's own machine
"""
