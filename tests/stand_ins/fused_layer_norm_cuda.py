"""apex's extension behind `apex.normalization`; its presence says that apex was built with CUDA extensions."""
