"""Stand-in of fla-core's chunked linear attention."""
