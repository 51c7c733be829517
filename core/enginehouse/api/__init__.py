"""The HTTP API: strict decoding, answers as JSON or events, the routes, the server around them."""
