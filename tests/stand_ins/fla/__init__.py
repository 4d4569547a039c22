"""Stand-in of fla-core 0.6."""
