"""The plugin against independent readers: ``jsonschema`` for schemas, ``re`` for expressions."""
