"""Stand-in for the extension module of the branch hybrid-ep of DeepEP, whose presence means that it is installed."""
