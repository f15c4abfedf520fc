"""One module a version of the schema, never changed once released."""
