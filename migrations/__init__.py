"""The history of the control plane's schema, as Alembic scripts. `api/database.py` runs them."""
