"""Stand-in for the C++ extension of DeepEP's hybrid-ep branch; the backend checks that this module exists."""
