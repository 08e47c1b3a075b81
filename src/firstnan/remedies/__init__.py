"""What may be changed in a program so that the value is not born."""
