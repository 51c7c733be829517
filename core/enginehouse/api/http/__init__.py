"""HTTP: the server, the guard in front of every route, who calls, and how bytes come and go."""
