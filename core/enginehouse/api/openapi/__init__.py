"""The OpenAPI document of the server, derived from routes, request bodies, plugins and limits; see ``document``."""
