"""The command line: parse, call one function, print. Nothing here imports torch before it must."""
