"""HTTP: the server, the guard in front of every route, authentication of callers, and transport of bytes."""
