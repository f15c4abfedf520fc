"""The history of the control plane's schema, as Alembic scripts. `api/store/database.py` runs them."""
