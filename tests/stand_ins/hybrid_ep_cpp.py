"""Stand-in for the extension module of the branch hybrid-ep of DeepEP, whose presence tells that it is installed."""
