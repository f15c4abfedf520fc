"""What differs on a machine without a GPU. Nothing here may run where a GPU is: `install` fails loudly there."""
