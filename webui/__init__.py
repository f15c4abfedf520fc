"""The dashboard: pages, partial pages, figures and static files, served by the control plane (docs/dashboard.md).

The packages are listed from bottom to top. A package imports only those above it in this list
(tests/test_import_rules.py):

- site: what all pages share (number formats, navigation, static files)
- figures: the queries and the drawing of each figure
- new_run: the form that starts a run
- run: facts about one run that several of its pages show
- pages: one module per page

`install.py` adds all of it to the service. `templates/` and `static/` hold the HTML templates and the files sent as
they are.
"""
