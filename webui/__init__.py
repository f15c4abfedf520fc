"""The dashboard: pages, pieces, figures and static files in the control plane's service (docs/dashboard.md)."""
