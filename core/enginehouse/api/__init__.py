"""HTTP API: strict decoding, JSON and event-stream responses, routes and the server."""
