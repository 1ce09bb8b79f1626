"""Version 1 of the wire; the Python code here is generated from the .proto files."""
