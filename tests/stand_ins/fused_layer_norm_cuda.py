"""Stand-in for the CUDA extension of `apex.normalization`, present if apex was built with them."""
