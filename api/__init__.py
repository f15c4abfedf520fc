"""The control plane: a FastAPI service with an SQL store that starts, shows and stops runs.

It imports neither vllm, torch, deepspeed nor openrlhf, so it also runs where none of them is installed. The packages
are listed from bottom to top. A package imports only packages of lower lines (tests/test_import_rules.py).

- `store`: tables, sessions, and the rules that keep rows consistent and fast
- `ingest`, `read`, `launch`: reports of runs; queries; runs that this service starts
- `live`, `webhooks`: streams that wait for changes in the store; messages to other services
- `http`: the parts that every request and every response passes through
- `access`: the service object, and authentication
- `routes`: one module per resource
- `demo`: content of `rhyme serve --demo`

`settings.py` has the options of `rhyme serve`; `app.py` builds the service.
"""
