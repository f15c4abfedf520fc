"""The dashboard: pages, pieces, figures and static files in the control plane's service (docs/dashboard.md).

Its rooms, from bottom to top; a room imports only those above it in this list (tests/test_import_rules.py):

    site        what all pages share: words, navigation, static files
    figures     what each figure asks of the store, and how it is drawn
    new_run     the form of a new run
    run         what the pages of a run say of it
    pages       one module a page

`install.py` puts them into the service; `templates/` and `static/` are what they fill and send.
"""
