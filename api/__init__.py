"""The control plane: a FastAPI service with an SQL store that starts, shows and stops runs.

Imports neither vllm, torch, deepspeed nor openrlhf: it runs where none of them is installed. Its rooms, from bottom to
top; a room imports only rooms of lower lines (tests/test_import_rules.py):

    store                    tables, sessions, and what keeps them true and fast
    ingest, read, launch     what runs report; what people ask; what this service starts
    live                     streams that wait for news of the store
    http                     what every request and every answer passes
    access                   the service, and who is asking it
    routes                   one module a resource
    demo                     what `rhyme serve --demo` shows

`settings.py` has the options of `rhyme serve`; `app.py` puts the service together.
"""
